"""qfuse's C++ kernels: compiled for this torch on first use, cached, registered as torch ops.

Importing this package does not build or load anything. :func:`load` does, once per process, and
returns the outcome: without a compiler the kernels are unavailable, and everything else works.

    library = kernels.load()
    if library.available:
        packed, sums = kernels.pack_weight(weight)
        y = kernels.linear_w8a8(x, x_scale, None, packed, sums, w_scale)

The ops of a loaded library are ``torch.ops.qfuse.linear_w8a8`` and so on; their arguments are
documented in :mod:`qfuse.kernels.ops`, :mod:`qfuse.kernels.weight_only` and their like.
"""

from qfuse.kernels.build import (
    copy_library,
    kernel_cache,
    library_key,
    read_description,
)
from qfuse.kernels.cat_ops import cat_channels
from qfuse.kernels.compilation.compiler import (
    KernelBuildError,
    KernelCompiler,
    find_kernel_compiler,
)
from qfuse.kernels.convolution_ops import (
    convolution_depthwise_w8a8,
    convolution_depthwise_w8a8_quantized,
    convolution_w8a8,
    convolution_w8a8_grouped,
    convolution_w8a8_grouped_quantized,
    convolution_w8a8_quantized,
)
from qfuse.kernels.grouped_ops import (
    linear_w4a8,
    linear_w4a8_quantized,
    linear_w4a8_rows,
    linear_w8a8_grouped,
    linear_w8a8_grouped_quantized,
    linear_w8a8_grouped_rows,
)
from qfuse.kernels.image_activation import image_activation_quantized
from qfuse.kernels.library import (
    KernelImage,
    KernelLibrary,
    build_every_path,
    instruction_set,
    load,
    load_images,
    release_result_memory,
    result_memory,
)
from qfuse.kernels.matmul_ops import attention, matmul_a8a8, matmul_a8a8_quantized
from qfuse.kernels.ops import linear_w8a8, linear_w8a8_quantized, linear_w8a8_rows
from qfuse.kernels.pack import pack_bytes, pack_floats, pack_weight, unpack_weight, weight_sums
from qfuse.kernels.pack4 import pack_weight4, unpack_weight4
from qfuse.kernels.pack_convolution import (
    convolution_sums,
    pack_convolution,
    pack_depthwise,
    pack_transposed,
    pack_transposed_values,
    pack_values,
    transposed_sums,
    unpack_convolution,
)
from qfuse.kernels.pack_groups import PackedGroups, pack_grouped, pack_groups
from qfuse.kernels.weight_only import linear_w4a16, linear_w8a16, linear_w16a32
from qfuse.kernels.weight_only_convolution import convolution_w4a16, convolution_w8a16

__all__ = [
    "KernelBuildError",
    "KernelCompiler",
    "KernelImage",
    "KernelLibrary",
    "PackedGroups",
    "attention",
    "build_every_path",
    "cat_channels",
    "convolution_depthwise_w8a8",
    "convolution_depthwise_w8a8_quantized",
    "convolution_sums",
    "convolution_w4a16",
    "convolution_w8a8",
    "convolution_w8a8_grouped",
    "convolution_w8a8_grouped_quantized",
    "convolution_w8a8_quantized",
    "convolution_w8a16",
    "copy_library",
    "find_kernel_compiler",
    "image_activation_quantized",
    "instruction_set",
    "kernel_cache",
    "library_key",
    "linear_w4a8",
    "linear_w4a8_quantized",
    "linear_w4a8_rows",
    "linear_w4a16",
    "linear_w8a8",
    "linear_w8a8_grouped",
    "linear_w8a8_grouped_quantized",
    "linear_w8a8_grouped_rows",
    "linear_w8a8_quantized",
    "linear_w8a8_rows",
    "linear_w8a16",
    "linear_w16a32",
    "load",
    "load_images",
    "matmul_a8a8",
    "matmul_a8a8_quantized",
    "pack_bytes",
    "pack_convolution",
    "pack_depthwise",
    "pack_floats",
    "pack_grouped",
    "pack_groups",
    "pack_transposed",
    "pack_transposed_values",
    "pack_values",
    "pack_weight",
    "pack_weight4",
    "read_description",
    "release_result_memory",
    "result_memory",
    "transposed_sums",
    "unpack_convolution",
    "unpack_weight",
    "unpack_weight4",
    "weight_sums",
]
