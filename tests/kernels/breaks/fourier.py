"""`fourier_lines` and `fourier_tiles` broken on purpose."""

from __future__ import annotations

from tests.kernels.breaks.base import FENCE, RACE, WRONG, breaks_of

lines = breaks_of("fourier_lines", "separable-{}", length=512)
tiles = breaks_of("fourier_tiles", length=512)

BREAKS = (
    lines(
        "levels are exchanged without a barrier",
        "Transform::exchange",
        "{{__syncthreads();}}",
        RACE | WRONG,
        "shape-15x15",
    ),
    lines(
        "the way back takes the twiddle factors of the way there",
        "Transform::twiddle",
        "{{inverse ? conjugate(w) : w => w}}",
        WRONG,
        "shape-15x15",
    ),
    lines(
        "elements lie a place too near",
        "Transform::place",
        "further + further / elements {{=> - j % 2}}",
        WRONG | RACE,
        "shape-15x15",
    ),
    lines(
        "spectra that are not conjugate",
        "fourier_lines_prepare",
        "= {{conjugate(v[0][j]) => v[0][j]}};",
        WRONG,
        "shape-15x15",
    ),
    lines(
        "every piece is the first",
        "fourier_lines_prepare",
        "begin = {{number % parts * piece => 0}}",
        WRONG,
        "shape-500x400",
    ),
    lines(
        "the next product's pixels come too early",
        "filter_segment",
        "if (several) {{__syncthreads()}};",
        RACE | WRONG,
        "rank-2",
    ),
    lines("the first product alone", "filter_segment", "sum[k][j] {{+ v[k][j]}}", WRONG, "rank-2"),
    lines("segments begin a pixel late", "filter_segment", "segment * pieces.outputs {{=> + 1}}", WRONG, "shape-15x15"),
    lines(
        "results past the end of a segment",
        "filter_segment",
        "if ({{i < outputs => true}}) of.put",
        FENCE | WRONG,
        "shape-15x15",
    ),
    lines(
        "rows of a constant border are its value",
        "ResultColumns::outside",
        "return value {{* (...) => }}",
        WRONG,
        "border-constant-over-image",
    ),
    lines(
        "the strip's columns begin at the first",
        "fourier_lines_rows",
        "anchor {{- first}}",
        WRONG,
        "shape-127x127",
        columns=64,
    ),
    lines(
        "columns past the end are stored",
        "ResultColumns::put",
        "if ({{2 * k + 1 < count => true}}) row",
        FENCE | WRONG,
        "border-replicate",
    ),
    tiles("the second tile is the first", "fourier_tiles_rows", "row_of(number {{+ 1}})", WRONG, "valid"),
    tiles("rows back of another pair", "fourier_tiles_results", "write(number {{+ 1}}, true)", WRONG, "valid"),
    tiles(
        "outputs of whole tiles",
        "fourier_tiles_results",
        "min(out_columns, {{out_width - tile.j => out_columns}})",
        FENCE | WRONG,
        "valid",
    ),
    tiles(
        "the first filter's spectrum for all",
        "fourier_tiles_columns",
        "{{filter * tile + }} column",
        WRONG,
        "valid-uint8-channels",
    ),
    tiles(
        "columns of the filter are not conjugate", "fourier_tiles_prepare_columns", "{{-}} v[k][j].im", WRONG, "valid"
    ),
)
