"""Constants after a quantized linear or convolution become part of its weight's scale and bias."""
