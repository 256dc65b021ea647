"""What breaks the scales of kernels on tensor cores: each shows on data of some range, which comes first here."""

from __future__ import annotations

from tests.kernels.patching import Patch

UNREPORTED = Patch("channels apart are not reported", "speculative_filters", "{{_ ? -_ :}}")
UNSCALED = Patch("filters are not scaled back", "store_sums", "_[_][_] {{* factor}}")

TENSOR_GEMM = (
    ("normal", Patch("a row's maximum leaves out half of its values", "split_row",
                     "{{_ = larger<strict>(_, __shfl_xor_sync(..., 1));}}")),
    ("normal", Patch("rows are scaled back by a millionth too much", "split_row",
                     "return _.inverse_scale {{=> * 1.000001f}}")),
    ("filters-apart", UNSCALED),
    ("filters-apart", Patch("all filters have one scale", "Speculation::scale",
                            "{{_ > 0 ? least_scale(_) : _ => 139u}}")),
    ("channels-apart", UNREPORTED),
    ("unseen", UNREPORTED),
    ("channels-apart", Patch("channels have no factors", "tensor_filters_of", "{{(_ == 0 || ...) => false}}")),
    ("channels-apart", Patch("pixels are not multiplied by the factors", "StageValues::load",
                             "= x[1][_ / 4][_ % 4] {{* _ * _}}")),
    ("unseen", Patch("channels apart have no factors", "tensor_filters_of",
                     "{{(_ == 0 ||}} _ - whole_exponent(_) > {{_) => 300}}")),
    ("tiny", Patch("pixels have one scale whatever the filters are", "write_header", "{{min(253u, 403 - _) => 140u}}")),
)  # fmt: skip

ONE_PRODUCT = (
    ("pixels-apart", Patch("sums keep their scale", "RunningScale::make_room",
                           "{{power_of_two(...) => 1.0f}} : {{0.0f => 1.0f}}")),
    ("pixels-apart", Patch("scales stay as they are", "RunningScale::make_room", "{{_ + _ > 268 => false}}")),
    ("pixels-apart", Patch("both rows are rescaled as the first", "consume_running", "*= ratio[{{_ / 2 % 2 => 0}}]")),
    ("pixels-apart", Patch("both rows are scaled back as the first", "consume_running", "*= back[{{_ / 2 % 2 => 0}}]")),
    ("pixels-apart", Patch("a row's maximum is that of one lane", "RunningScale::largest_of",
                           "return {{fmaxf(_, __shfl_xor_sync(...)) => largest}}")),
    ("channels-apart", UNREPORTED),
    ("unseen", UNREPORTED),
)  # fmt: skip

#: And how many taps a block has.
TENSOR_WEIGHT = (
    ("filters-apart", 1, Patch("a filter's maximum leaves out half of its values", "SplitRows::store",
                               "_ < {{32 => 16}}")),
    ("filters-apart", 1, Patch("filters far apart have one scale", "FilterScales::FilterScales",
                               "power_of_two(127 - {{8 => 120}})")),
    ("filters-apart", 1, Patch("four filters are scaled back as the first", "promote_scaled",
                               "_[{{_ / 4 * 2 + _ % 2 => 0}}]")),
    ("normal", 1, Patch("low halves of dy are zeros", "SplitRows::rest_of", "return {{cvt_rn_f16x2_f32(...) => 0u}}")),
    ("opposed", 1, Patch("pixels have no factors", "PixelFactors::PixelFactors", "= _ + {{_ => 255}} < _")),
    ("unseen", 1, Patch("pixels without dy have a factor", "root_code", ": {{0 => 127}}")),
    ("opposed", 3, Patch("pixels that no tap reads decide scales", "SplitRows::load",
                         "{{_ < Pixels::used % 8 ?}} _[_ - 1][_] {{: 0.0f}}")),
    ("opposed", 3, Patch("all taps have the factors of one", "PixelFactors::multiply_shifted", "+ _ % 2 {{+ _}}")),
)  # fmt: skip

#: And the layout.
TENSOR_WINOGRAD = (
    ("NHWC", "filters-apart", UNSCALED),
    ("NHWC", "channels-apart", Patch("four channels have the factor of the first", "load_states",
                                     "16 * _ + 4 * _ {{+ _}}]")),
    ("NHWC", "normal", Patch("the second row's scale replaces the first one's", "split_state", "_[{{_ => 0}}] =")),
    ("NCHW", "channels-apart", Patch("pixels are multiplied by half of the factors", "scale_channels",
                                     "= x[_][_ / 4][_ % 4] * _ {{* _}};")),
)  # fmt: skip

TENSOR_WEIGHT_IMAGES = (
    ("images-opposed", Patch("factors of images are ignored", "sum_images",
                             "{{static_cast<unsigned>(factors_of(_).apart) => 0u}}")),
)  # fmt: skip

#: Infinities that reach results of other windows: converted once for all taps of a row, they reach also the one that
#: does not see them; rows too many of a stage are such as see x outside the image.
NO_NUMBERS = (
    (
        "tensor_weight-taps",
        Patch("infinities are converted once", "WeightFragments::infinite", "return {{=> false &&}}"),
    ),
    ("tensor_weight_images-2", Patch("rows too many are outside dy", "ImageUnits::first_p", "_ {{< _ ? _ : _ - _}}")),
)  # fmt: skip

ALL = (*TENSOR_GEMM, *ONE_PRODUCT, *TENSOR_WEIGHT, *TENSOR_WINOGRAD, *TENSOR_WEIGHT_IMAGES, *NO_NUMBERS)
