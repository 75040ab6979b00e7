"""How this process's allocator treats the large packets of bulk transfers."""

import ctypes

# glibc's mallopt(3): M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD.
_OPTIONS = ((-3, 1 << 30), (-1, 512 << 20), (-2, 64 << 20))


def keep_big_blocks() -> None:
    """Tell glibc to keep big blocks: asyncssh's large packets would otherwise be mapped and unmapped one by one."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return  # another C library
    for option, value in _OPTIONS:
        mallopt(option, value)
