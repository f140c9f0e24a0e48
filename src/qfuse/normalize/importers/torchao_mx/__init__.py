"""torchao's MX and NVFP4 arithmetic, as exports write it out."""
