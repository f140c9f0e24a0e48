"""Which C++ standard library a shared library has: torch's, or one of its own.

torch's headers pass streams and errors across libraries. With two copies of the standard library in
one process the first error that is raised ends it.
"""

from __future__ import annotations

from pathlib import Path

FIX = (
    "name a compiler in CXX that links libstdc++ as a shared library: without -static-libstdc++ "
    "and -stdlib=libc++"
)
"""What to do about a compiler whose libraries have one of their own."""

_SHARED = b"libstdc++.so"
# std::locale's constructor, which every stream calls: from the library, or in a copy of it.
_USED = b"_ZNSt6localeC1Ev"
_LIBCXX = b"_ZNSt3__1"


def own_cpp_library(library: Path, *, has_streams: bool = False) -> str | None:
    """Return what is wrong with the C++ standard library of a shared library, or ``None``.

    Args:
        library: A file that the compiler made; one without streams needs no standard library.
        has_streams: Whether it has streams for certain: a copy may have no names.

    Raises:
        OSError: The file cannot be read.
    """
    data = library.read_bytes()
    if _LIBCXX in data:
        return "it links libc++, and torch libstdc++"
    if (has_streams or _USED in data) and _SHARED not in data:
        return "it links a copy of libstdc++ into each library, and torch shares one"
    return None
