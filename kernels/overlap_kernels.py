"""What kernels of a decoded token do before the one ahead of them has ended (``overlap``)."""

from __future__ import annotations

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton without NVIDIA's part
    gdc_launch_dependents = gdc_wait = None

AVAILABLE = gdc_wait is not None

# One thread asks for the whole stretch, from an address and of a size that are multiples of 16.
MOST_FETCHED = tl.constexpr(2**19)  # bytes; the instruction has 16 bits for the size over 16
_FETCH = tl.constexpr("""{
    .reg .pred %first, %some;
    .reg .u32 %thread;
    mov.u32 %thread, %tid.x;
    setp.eq.u32 %first, %thread, 0;
    setp.gt.and.s32 %some, $2, 0, %first;
    @%some cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.u32 $0, 0;
}""")


@triton.jit
def let_go(OVERLAP: tl.constexpr):
    """Let the next kernel start once all programs of this one have come here.

    First of all: behind a load that is used before the wait it would come a trip to memory later.
    """
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def take_turn(OVERLAP: tl.constexpr):
    """Wait until all kernels before this one have ended.

    Every program calls it, and before it writes anything: so whoever waits for this kernel has
    waited for those ahead of it, too.
    """
    if OVERLAP:
        gdc_wait()


@triton.jit
def fetch(ptr, count, OVERLAP: tl.constexpr):
    """Ask for ``count`` elements side by side to be brought into the second-level cache.

    That cache is where all see the same, so this is right also for what is still being written.
    """
    if OVERLAP:
        bytes_each: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        first = ptr.to(tl.int64)
        aligned = (first + 15) & -16
        size = first + tl.minimum(count, MOST_FETCHED // bytes_each) * bytes_each - aligned
        tl.inline_asm_elementwise(
            _FETCH,
            "=r,l,r",
            [aligned, (size & -16).to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
