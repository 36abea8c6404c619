"""The kernel: the part of the library that has to be right for an epsilon to be true."""

__all__: list[str] = []
