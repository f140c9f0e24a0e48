"""Turn errors of torch.export into errors with the line of the model and a fix."""

from __future__ import annotations

import re
import traceback

from qfuse.capture._export_api import error_kind
from qfuse.capture.provenance import UserFiles
from qfuse.ir.errors import CaptureError

_FILE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
# torch's hints on debugging torch: up to the end of the sentence, or everything that follows.
_SENTENCE = re.compile(
    r"\s*(For more information|For extended logs|If you suspect|If you're using mark_dynamic)[^\n]*"
)
_TAIL = re.compile(
    r"\n+(The error above occurred when calling|consider using data-dependent|Caused by:|"
    r"The following call raised|Suggested fixes:)"
)
_SUGGESTION = re.compile(r"Suggested fixes:\n(?P<fixes>(?:[ \t]+.+\n?)+)")

_CONSTANT = re.compile(r"(?P<name>\w+) = (?P<size>\d+)")
_OUT_OF_RANGE = re.compile(r"^(?P<size>\d+) not in range \[")
_NAMES = re.compile(r"keys must be the arg names \[(?P<names>[^\]]*)\]")

_FIXES = {
    "buffer": "write a copy of the value: self.buffer.copy_(value.clone()), or self.buffer = "
    "value.clone()",
    "container": "a container among the results runs operators when it is rebuilt, as the dynamic "
    "cache that transformers registers does: pass use_cache=False, or do not call "
    "register_dynamic_cache_export_support; or torch lost constants that a tensor type makes while "
    "it is traced, as those of NVFP4 and of MX with 4 or 6 bits do: quantize to another format",
    "data": "use tensor ops instead of Python control flow: torch.where or a mask for a branch, "
    "index_copy_ or index_select with a tensor of indices for a place that varies, a fixed size "
    "for a slice; or keep this part out of the compiled model",
    "fake": "register a fake kernel for the operator with torch.library.register_fake",
    "file": "torch cannot take up a saved program with derived sizes: capture the program before "
    "it is saved, or the module",
    "meta": "make the tensor a buffer, and load it with the weights, or make it on the device of "
    "the input in forward",
    "input": "pass tensors, numbers, strings, None and containers of these; register a container "
    "class with torch.export.register_dataclass",
    "output": "return tensors and containers that torch knows; for a transformers model pass "
    "use_cache=False, or register the class with torch.export.register_dataclass",
    "shape": "use x = x.t() instead of x.t_(), and so on, which leaves the input as it is",
    "sizes": "declare the sizes that the model allows in dynamic_shapes; examples of at least 2",
}
# For errors that torch raises without a specific type.
_PATTERNS = (
    (r"not in the correct order or is not found in the exported program", "buffer"),
    (r"Node copy_\w* of type call_function is missing nn_module_stack", "buffer"),
    (r"is not in the constants dictionary", "container"),
    (r"found at least two devices.*\bmeta\b", "meta"),
    (r"expected sympy\.Symbol", "file"),
    (r"num_mutated_inp_runtime_indices|a set_ on a graph input", "shape"),
    (r"in output, which is not a known type", "output"),
    (r"Unsupported input type", "input"),
    (
        r"conflicts between user-specified ranges|dynamic_shapes|tree_name|Constraints violated",
        "sizes",
    ),
    (r"data-dependent|\.item\(\)|unbacked", "data"),
)
_OTHER = (
    "check that the model runs as model(*args, **kwargs); what runs only outside of torch, such as "
    "numpy, files or other processes, cannot be captured"
)


def capture_error(error: Exception, stage: str) -> CaptureError:
    """Return the ``CaptureError`` to raise from ``error``.

    Args:
        error: The error raised while tracing.
        stage: The current step, for errors that are not classified.
    """
    # A type is more reliable than the text of a message.
    kind = error_kind(error) or _kind_of_message(error)
    text = str(error)
    what = _SENTENCE.sub("", _TAIL.split(text, maxsplit=1)[0]).strip() or type(error).__name__
    suggested = _SUGGESTION.search(text)
    names = _NAMES.search(text)
    if suggested is not None:
        fix = _suggested_fix(suggested["fixes"])
    elif (outside := _OUT_OF_RANGE.search(text)) is not None:
        fix = f"declare a range with the example's size {outside['size']}, or give another example"
    elif "(expected None, an int, a Dim" in text or "(expected either a list/tuple" in text:
        fix = 'as in dynamic_shapes={"x": {0: torch.export.Dim("batch", min=1, max=64)}}'
    elif "structure of `inputs` and `dynamic_shapes`" in text:
        fix = "give dynamic_shapes the containers of the inputs, with None where nothing varies"
    elif names is not None:
        fix = f"use the names of the inputs as the keys of dynamic_shapes: {names['names']}"
    else:
        fix = _FIXES.get(kind, _OTHER)
    if "specialized it to be a constant (1)" in text or "hint of 1" in text:
        fix = "use example inputs whose dynamic axes are at least 2 long, and Dim(..., min=1)"
    headline = {
        "buffer": "torch cannot capture a value that is written to two buffers, or assigned to one "
        "as it is",
        "shape": "the model changes the shape, the strides or the memory of an input in place",
        "data": "a branch or a size in the model depends on the values of a tensor",
        "meta": "a tensor that the model uses is on the meta device, so it has no values",
        "sizes": "the dynamic sizes do not fit the model",
    }.get(kind, f"{stage} failed with {type(error).__name__}")
    return CaptureError(f"{headline}: {what}", where=_user_frame(error), fix=fix)


def empty_error(error: Exception, shape: tuple[int, ...]) -> CaptureError:
    """Return the ``CaptureError`` for a model that cannot be traced with an empty example."""
    first, *_ = str(error).strip().splitlines() or [type(error).__name__]
    return CaptureError(
        f"the model cannot be traced with an example without elements, of shape {shape}: {first}",
        where=_user_frame(error),
        fix="pass an example with elements; torch.export.Dim(..., min=0) allows empty inputs later",
    )


def _suggested_fix(lines: str) -> str:
    """Return what to do about torch's suggestions, such as ``n = 4`` and ``n = 2*m``."""
    fixes, declared = [], []
    for line in filter(None, map(str.strip, lines.splitlines())):
        constant = _CONSTANT.fullmatch(line)
        if constant is None:
            declared.append(re.sub(r"\s+", " ", line))
        else:
            name, size = constant["name"], constant["size"]
            fixes.append(f"leave {name} out of dynamic_shapes: the model works for {size} only")
    return "; ".join([*fixes, *([f"declare {'; '.join(declared)}"] if declared else [])])


def _kind_of_message(error: Exception) -> str:
    text = str(error)
    return next((kind for pattern, kind in _PATTERNS if re.search(pattern, text)), "")


def _user_frame(error: Exception) -> str | None:
    """Return ``file:line: code`` of the deepest frame of the user's model in the traceback.

    The first frames are those of the caller, which is user code too: only frames below the first
    frame of torch count.
    """
    files = UserFiles()
    frames = traceback.extract_tb(error.__traceback__)
    inside = next((i for i, f in enumerate(frames) if not files.owns(f.filename)), len(frames))
    own = [f for f in frames[inside:] if files.owns(f.filename)]
    if not own:
        return None
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}"
