"""How patches find their place in C++, and what they say when they do not (see patching.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from leanconv.runtime.compile import INCLUDE
from tests.kernels.patching import Patch, Source, StalePatch, broken_kernels, patched

HEADER = Path("header.cuh")
TEXT = """
#pragma once
namespace leanconv {

template <class Problem> constexpr bool in_fours = Problem::chwn && Problem::vectors;

template <class Problem, int count = (Problem::k > 4 ? 4 : 1)>
struct Ring {
    static constexpr int stages = 3, depth[2] = {1, 2};
    int at{0};  // a brace of a value, as { and ; in comments are none

    explicit Ring(int first) : at{first}, parity(0) { init(first); }
    __device__ void wait(int stage) const {
        wait_group<stages - 2>();
        // the stage has landed
        __syncthreads();
#pragma unroll
        for (int i = 0; i < count; ++i)
            if (stage < Problem::w) read(tiles[stage % 2], max(low, high));
        __syncthreads();
        #pragma unroll 1
    }
};
template <class Problem>
struct Ring<Problem, 0> : Base<1> {
    int parity;
    __device__ void wait(int stage) const { __syncthreads(); }
    bool operator()(int i) const { return i < 0; }
};

template <class T> T convert(int v);
template <>
__device__ __launch_bounds__(Tuning::threads) float convert<float>(int v) { return v + 1; }

extern "C" __global__ void kernel(const char* text = "}") {
    const auto store = [&](int row) { to[row] = first + row; };
    if (text[0] == ';') store(1);
}
}  // namespace leanconv
"""


def changed(where: str, change: str, times: int = 1, only: int | None = None) -> tuple[list[str], list[str]]:
    """The lines that a patch takes away from the text, and those that it adds."""
    new = patched(Patch("a break", where, change, times, only), {HEADER: TEXT})[HEADER]
    before, after = ([" ".join(line.split()) for line in text.splitlines()] for text in (TEXT, new))
    return [line for line in before if line not in after], [line for line in after if line not in before]


def test_preprocessor_lines_are_no_tokens() -> None:
    texts = [token.text for token in Source(TEXT).tokens]
    assert "#" not in texts and "pragma" not in texts and "unroll" not in texts


def test_the_names_of_functions_structs_and_constants() -> None:
    names = ["::".join(scope.path) for scope in Source(TEXT).scopes]
    assert names == [
        *("in_fours", "Ring", "Ring::stages", "Ring::Ring", "Ring::wait"),
        *("Ring", "Ring::wait", "Ring::operator()", "convert", "kernel"),
    ]


def test_all_kernels_can_be_read() -> None:
    for path in INCLUDE.rglob("*.cuh"):
        words = {word for scope in Source(path.read_text("utf-8")).scopes for word in scope.path}
        assert all(word.isidentifier() or word.startswith("operator") for word in words), path


@pytest.mark.parametrize(
    ("where", "change", "old", "new"),
    [
        ("Ring::wait", "<stages - {{2 => 1}}>", "wait_group<stages - 2>();", "wait_group<stages - 1>();"),
        ("wait", "if ({{... => true}}) read", "if (stage < Problem::w) read(", "if (true) read("),
        ("Ring", "_ {{< => <=}} Problem::w", "if (stage < Problem::w)", "if (stage <= Problem::w)"),
        ("Ring::wait", "read({{_[_ % 2] => _}}, ...)", "read(tiles[stage % 2], max", "read(_, max"),
        ("Ring::wait", "max({{_1 => _2}}, {{_2 => _1}})", "max(low, high)", "max(high, low)"),
        ("Ring::wait", "_1 % 2], {{max(_, _2) => _1 + _2}}", "max(low, high)", "stage + high"),
        ("Ring::wait", "for (...; {{_ < _ =>}}; ++_)", "i = 0; i < count; ++i", "i = 0; ; ++i"),
        ("Ring::stages", "= {{3 => 4}}", "stages = 3, depth", "stages = 4, depth"),
        ("in_fours", "{{&& Problem::vectors}}", "Problem::chwn && Problem::vectors;", "Problem::chwn ;"),
        ("Ring::operator()", "{{< => <=}} 0", "return i < 0", "return i <= 0"),
        ("convert", "{{+ 1}}", "return v + 1;", "return v ;"),
        ("kernel", "{{_ +}} _;", "= first + row;", "= row;"),
        ("kernel", 'text = {{"}" => nullptr}}', 'text = "}"', "text = nullptr"),
    ],
)
def test_a_change_is_made_where_its_tokens_are(where: str, change: str, old: str, new: str) -> None:
    taken, added = changed(where, change)
    assert len(taken) == len(added) == 1
    assert old in taken[0] and added[0].replace(" ", "") == taken[0].replace(old, new).replace(" ", "")


def test_white_space_comments_and_pragmas_do_not_matter() -> None:
    """Neither in the kernel nor in the pattern."""
    assert changed("wait", "wait_group<stages - 2>();\n  {{__syncthreads ( ) ;}} for") == changed(
        "wait", "wait_group<stages-2>(); {{__syncthreads();}} /* then */ for(", 1
    )


def test_a_statement_is_inserted() -> None:
    assert changed("Ring::Ring", "{{=> check();}} init")[1][0].endswith("{ check(); init(first); }")
    assert changed("Ring::Ring", "init(_); {{=> check();}}")[1][0].endswith("{ init(first); check(); }")


def test_every_time_or_only_one() -> None:
    """Of the barriers the third is that of the specialisation."""
    alone = "__device__ void wait(int stage) const { __syncthreads(); }"
    assert changed("Ring::wait", "{{__syncthreads();}}", 3)[0] == ["__syncthreads();", "__syncthreads();", alone]
    assert changed("Ring::wait", "{{__syncthreads();}}", 3, only=3)[0] == [alone]
    assert changed("convert, kernel", "{{+ => -}}", 2)[0] == [
        "__device__ __launch_bounds__(Tuning::threads) float convert<float>(int v) { return v + 1; }",
        "const auto store = [&](int row) { to[row] = first + row; };",
    ]


@pytest.mark.parametrize(
    ("where", "change", "why"),
    [
        ("Ring::wait", "{{__syncwarp();}}", r"a break: `Ring::wait` has '{{__syncwarp\(\);}}' 0 times, not 1: adapt"),
        ("Ring::wait", "{{__syncthreads();}}", "3 times, not 1"),
        ("Ring::Ring", "{{__syncthreads();}}", "0 times, not 1"),
        ("Ring::wait", "wait_group... {{__syncthreads();}}", "0 times"),  # a wildcard stays within one statement
        ("Ring::wait", "read({{...}}]", "0 times"),  # with balanced brackets
        ("Ring::wait", "read({{_1}}[...], max(_1, _))", "0 times"),  # and one number stands for one name
        ("Ring::wait", "{{if}} (_ < 4)", "0 times"),  # a literal is no name
        ("Ring::lock", "{{__syncthreads();}}", "a break: there is no `Ring::lock`: adapt"),
        ("ing::wait", "{{__syncthreads();}}", "there is no `ing::wait`"),
    ],
)
def test_a_patch_without_its_place_is_refused(where: str, change: str, why: str) -> None:
    with pytest.raises(StalePatch, match=why):
        changed(where, change)


@pytest.mark.parametrize("change", ["", "__syncthreads();", "... {{+ 1}}", "{{read(...}}", "{{=> if (lane == 0)}}"])
def test_a_change_that_names_no_place_is_refused(change: str) -> None:
    with pytest.raises(ValueError, match="marks nothing"):
        changed("Ring::wait", change)


def test_broken_kernels_are_a_copy(tmp_path: Path) -> None:
    patch = Patch("no barrier", "TileProduct::run", "{{__syncthreads();}} read(0, 0)")
    copy = broken_kernels(tmp_path, patch)
    headers = [path.relative_to(INCLUDE) for path in INCLUDE.rglob("*.cuh")]
    assert len([name for name in headers if (copy / name).read_bytes() != (INCLUDE / name).read_bytes()]) == 1
