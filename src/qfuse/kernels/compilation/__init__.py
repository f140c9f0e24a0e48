"""How the C++ kernels are compiled: the compiler, and files that later builds use again."""
