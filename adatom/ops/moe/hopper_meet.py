# mypy: ignore-errors
"""Programs that gather the same rows of x keep together on Hopper (Gluon).

Tiles of the same rows have columns of their own, but read the same rows. What L2 has lost of these when the last
tile comes is read again from memory, whose bandwidth the experts' matrices want for themselves.
"""

from adatom.tiles.hopper import gl, gluon

# it gives up in the end: nobody may have to wait for a program that has not begun
_AWAIT = gl.constexpr("""{
.reg .pred done; .reg .b32 count, tries;
mov.u32 tries, 64;
again: ld.relaxed.gpu.global.s32 count, [$1];
setp.ge.s32 done, count, $2;
@done bra over;
nanosleep.u32 200;
sub.u32 tries, tries, 1;
setp.gt.u32 done, tries, 0;
@done bra again;
over: mov.u32 $0, 0;
}""")


@gluon.jit
def meet(Lines, t, columns, times):
    """Wait, but not for ever, until the tiles of tile t's rows, `columns` of them, have all been here so many times."""
    met = Lines + 4 * (t // columns + 1) + 3
    gl.atomic_add(met, 1, sem="relaxed")
    gl.inline_asm_elementwise(_AWAIT, "=r,l,r", [met, times * columns], dtype=gl.int32, is_pure=False, pack=1)
