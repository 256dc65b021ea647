"""What the kernels of tensor cores do for layers of volumes, broken on purpose."""

from __future__ import annotations

from tests.kernels.breaks.base import FENCE, RACE, WRONG, breaks_of

gemm = breaks_of("tensor_gemm", "volume-tensor-{}")
weight = breaks_of("tensor_weight", "volume-tensor-{}")
nhwc = breaks_of("native_gemm_16bit", "volume-tensor-{}-nhwc")
nchw = breaks_of("native_gemm_nchw", "volume-tensor-{}-nchw")
filters = breaks_of("native_weight_nchw", "volume-tensor-{}-nchw")

BREAKS = (
    gemm("a tap's slice in steps of one", "tap_deep", "{{* Depth<Problem>::dilation}}", WRONG | RACE, "dilated-nhwc"),
    gemm(
        "a tap of linear pixels by the rows of one slice",
        "TapMask::inside",
        "_[_] + _.{{r => t}} * Problem::dilation_h",
        WRONG | RACE,
        "nchw",
        linear=True,
    ),
    gemm(
        "columns of slices outside the volume",
        "ColumnCopies::stage",
        "Problem::w {{&& _}};",
        WRONG | FENCE,
        "strides-nchw",
        linear=False,
    ),
    weight(
        "columns of slices outside the volume",
        "WeightProducer::copy_x_columns",
        "Problem::w {{&& _}};",
        WRONG | FENCE,
        "wgrad-nchw",
    ),
    weight(
        "copies of x by the rows of one slice",
        "WeightRow::down",
        "{{% Problem::r}}",
        WRONG | FENCE | RACE,
        "wgrad-nchw",
    ),
    nhwc(
        "windows begin in the output's slice",
        "produce",
        "_.slice * D::stride {{- D::pad}}",
        WRONG | RACE,
        "fprop-float16",
    ),
    nchw(
        "slices outside the volume are read",
        "PixelUnit::load",
        "_ {{&& static_cast<unsigned>(_) < D::d}}",
        WRONG | FENCE,
        "fprop-float16",
    ),
    nchw(
        "every slice of the filters reads the first one's pixels",
        "NchwGemm::load_pixels",
        "{{_.block / Filters::blocks => 0}}",
        WRONG,
        "fprop-float16",
    ),
    nchw(
        "a gradient's slices of filters are not rotated",
        "pack_filters",
        "{{Slices::last - _ * Slices::apart => slice}}",
        WRONG,
        "dgrad-float16",
    ),
    nchw(
        "outputs of a phase in neighbouring slices",
        "OutputNchw::store",
        "{{* DepthPhases<Problem>::step}}",
        WRONG | RACE,
        "strides-dgrad-float16",
    ),
    filters(
        "every slice's weights from the first one's pixels",
        "native_weight_nchw",
        "return _.input(_); }, {{_.slice => 0}}",
        WRONG,
        "wgrad-float16",
    ),
    filters(
        "every slice's weights in one place",
        "store_windows",
        "{{_.slice * Weights::all_taps +}}",
        WRONG | RACE,
        "wgrad-float16",
    ),
)
