"""Memory layout of activations: channels-last regions around quantized convolutions."""
