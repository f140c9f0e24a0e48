"""Importer of torchao's MX and NVFP4 arithmetic, which exports contain op by op."""
