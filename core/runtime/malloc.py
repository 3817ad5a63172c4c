"""What the C library's allocator does with large buffers that come and go."""

from functools import cache

# The largest that glibc adapts to is 32 MiB, the block's own head included.
_LARGEST = 32 * 1024 * 1024 - 64 * 1024


@cache
def keep_freed_buffers() -> None:
    """Let buffers of many kilobytes be made from memory that was freed, not from new pages each time.

    glibc maps each block of more than 128 KiB by itself and unmaps it when it is freed, so every frame or message of a
    megabyte costs 256 page faults: 0.5 ms, where copying it costs 0.04. It adapts when the program frees such a block
    (mallopt(3), M_MMAP_THRESHOLD), up to blocks of its size, and then keeps twice as much freed memory at hand. So one
    block of the largest size is made and freed here, untouched. Setting MALLOC_MMAP_THRESHOLD_ overrides this;
    it does nothing with other C libraries.
    """
    bytes(_LARGEST)
