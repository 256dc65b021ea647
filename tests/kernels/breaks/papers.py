"""`im2win` and `im2win_basic` broken on purpose."""

from __future__ import annotations

from tests.kernels.breaks.base import FENCE, WRONG, breaks_of

im2win = breaks_of("im2win")
basic = breaks_of("im2win_basic")

BREAKS = (
    im2win("filters in their own order", "filter_element", "_ {{% Problem::r * Problem::s + _ / Problem::r}}",
           WRONG, "plain-nchw"),
    im2win("filters in their own order, channels last", "filter_element", "{{_ => tap}} * Problem::group_c",
           WRONG, "plain-nhwc"),
    im2win("a window begins at its output's column", "WindowTensor::first", "{{* Problem::stride_w}}",
           WRONG, "stride-nchw"),
    im2win("a window's columns are not dilated", "WindowTensor::tap", "_ % Problem::s {{* Problem::dilation_w}}",
           WRONG, "dilation-nchw"),
    im2win("the transform reads a row above the image", "im2win_transform", "_ >= {{0 => -1}} && _ < Problem::h",
           WRONG, "plain-nchw"),
    im2win("the transform reads a column outside the image", "im2win_transform", "_ {{< => <=}} Problem::w",
           WRONG, "plain-nhwc"),
    im2win("the transform writes past its end", "im2win_transform", "{{if (threadIdx.x + _ * _ < _)}}",
           FENCE, "odd-nchw"),
    im2win("the transform reads past the end", "im2win_transform", "{{(}} _ {{< _ ? _ : 0)}}", FENCE, "odd-nchw"),
    im2win("the transform stays in the block's first plane", "im2win_transform", "{{(_ + _) / Problem::p => 0}}",
           WRONG, "odd-nchw"),
    im2win("the transform forgets the dilation", "im2win_transform", "% Problem::r {{* Problem::dilation_h}}",
           WRONG, "dilation-nhwc"),
    basic("the first group's windows for all", "im2win_basic", "{{_ / Problem::group_k => 0}}", WRONG, "groups-nchw"),
    basic("outputs past the end are made", "im2win_basic", "{{if (_ >= _ * Problem::k * _) return;}}",
          FENCE, "odd-nchw"),
)  # fmt: skip
