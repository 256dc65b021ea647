"""`register_cache` broken on purpose."""

from __future__ import annotations

from tests.kernels.breaks.base import FENCE, MISALIGNED, RACE, WRONG, breaks_of

cache = breaks_of("register_cache")

BREAKS = (
    cache("input rows and filter read before they are there", "register_cache",
          "cp_async_wait_group<0>(); {{__syncthreads();}}", RACE, "border-constant"),
    cache("input rows not waited for", "register_cache", "{{cp_async_wait_group<0>();}}", RACE, "border-constant"),
    cache("outputs staged over rows still in use", "register_cache",
          "if constexpr (Problem::filters == 1) {{__syncthreads()}};", RACE, "shape-7x7", "border-wrap-large"),
    cache("outputs staged without a barrier", "RowWriter::store", "{{__syncwarp();}}",
          RACE, "border-constant", times=2),
    cache("inside test forgets the right halo", "RowLoader::RowLoader",
          "{{_ + Base::width + Base::right <= _.width => true}}", WRONG, "border-constant", "shape-7x7"),
    cache("inside test forgets the left halo", "RowLoader::RowLoader", "{{_ >= Base::left &&}}", WRONG, "shape-7x7"),
    cache("inside test one row too high", "RowLoader::inside", "_ >= {{0 => -1}}", WRONG, "shape-2x2", "shape-7x7"),
    cache("inside test one row too low", "RowLoader::inside", "_ + _ <= _.height {{=> + 1}}",
          WRONG, "shape-4x4", "shape-7x7", "shape-5x3", "shape-3x5"),
    cache("inside test forgets alignment", "aligned",
          "{{reinterpret_cast<unsigned long long>(_) % 16 => true || pitch}} == 0",
          MISALIGNED | "aligned", "pitch-odd"),
    cache("columns past the end are stored", "RowWriter::store", "{{if (32 * _ + _ < _)}}", WRONG, "border-constant"),
    cache("rows past the end are stored", "register_cache", "{{if (_ + _ < _)}} _.", FENCE, "border-constant"),
    cache("reflect off by one", "ReflectBorder::map", "2 * _ - {{1 => 2}} - _", WRONG, "border-reflect"),
    cache("reflect101 off by one", "Reflect101Border::map", "2 * _ - {{2 => 3}} - _", WRONG, "border-reflect101"),
    cache("wrap without the modulo", "WrapBorder::map", "{{positive_modulo(_1, _2) => _1 < 0 ? _1 + _2 : _1 - _2}}",
          FENCE, "border-wrap-over-image"),
    cache("constant border reads the image", "ConstantBorder::map", "{{-1 => 0}}", WRONG, "border-constant"),
    cache("filter shifted by one weight", "register_cache", "_[(_ + _) % _][_ + _1 + _ {{=> - (_1 > 0)}}]",
          WRONG, "border-constant"),
    cache("every result goes to the first filter's place", "register_cache", "_.y += {{_ => 0}}", WRONG, "filters"),
    cache("every filter has the weights of the first", "register_cache", "weights {{+ _ * _ * _}}", WRONG, "filters"),
    cache("every tile has the first one's filters", "register_cache", "const int _ = {{_ * _ * _ +}}",
          WRONG, "filters-in-tiles"),
    cache("the last tile has as many filters as the others", "register_cache",
          "{{min(Problem::filters, ...) => Problem::filters}}", FENCE, "filters-in-tiles"),
    cache("several filters stage outputs over rows still in use", "register_cache",
          "Problem::filters > 1 ? {{=> 0 *}} _", RACE | WRONG, "filters-odd-rows"),
)  # fmt: skip
