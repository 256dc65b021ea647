"""What the kernels of tensor cores do for layers of volumes, broken on purpose."""

from __future__ import annotations

from tests.kernels.breaks.base import FENCE, RACE, UNDER_WAY, WRONG, breaks_of

gemm = breaks_of("tensor_gemm", "volume-tensor-{}")
pairs = breaks_of("tensor_winograd", "volume-tensor-{}-nchw")
weight = breaks_of("tensor_weight", "volume-tensor-{}")
nhwc = breaks_of("native_gemm_16bit", "volume-tensor-{}-nhwc")
nchw = breaks_of("native_gemm_nchw", "volume-tensor-{}-nchw")
filters = breaks_of("native_weight_nchw", "volume-tensor-{}-nchw")
copied = breaks_of("native_weight_nhwc", "volume-tensor-{}-nhwc")
window = breaks_of("depthwise_window", "volume-depthwise-{}")
gradient = breaks_of("depthwise_input", "volume-depthwise-{}")
weights = breaks_of("depthwise_weight", "volume-depthwise-{}")
patches = breaks_of("implicit_gemm_patches", "volume-{}")

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
    gemm(
        "slices outside the volume by lanes",
        "LaneCopies::place",
        "_ < F::taps {{&& _}} &&",
        WRONG | FENCE,
        "lanes-nhwc",
        rows=True,
    ),
    pairs(
        "rows of other slices",
        "LinearPairPixels::in_rows",
        "return {{static_cast<unsigned>(...) < Problem::h => true}}",
        WRONG,
        "plain",
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
    nchw(
        "every CTA of a cluster multiplies the first stages",
        "BlockShare::BlockShare",
        "{{static_cast<int>(cluster_rank()) => 0}} * share",
        WRONG,
        "fprop-float16",
        split=2,
    ),
    nchw(
        "every CTA of a cluster stores the first filters",
        "NchwGemm::store",
        "{{static_cast<int>(cluster_rank()) => 0}} * own_filters",
        WRONG | RACE,
        "fprop-float16",
        split=2,
    ),
    nchw(
        "sums lie where stages are still read",
        "NchwGemm::store",
        "{{barrier_sync(...);}}",
        UNDER_WAY | RACE,
        "fprop-float16",
        split=2,
    ),
    copied(
        "windows begin in the output's slice",
        "copy_stages",
        "_ / Problem::p * D::stride {{- D::pad}}",
        WRONG | RACE,
        "wgrad-float16",
    ),
    copied(
        "every slice's weights from the first one's pixels",
        "copy_stages",
        "{{_.r / Problem::r => 0}} * D::dilation",
        WRONG,
        "wgrad-float16",
    ),
    copied(
        "rows of all slices are those of one",
        "copy_stages",
        "{{_ % Problem::p => p}} * Problem::stride_h",
        WRONG | "corners",
        "wgrad-float16",
    ),
    window(
        "slices outside the volume are read",
        "depthwise_window",
        "_ {{&& static_cast<unsigned>(_ + _) < static_cast<unsigned>(D::d)}}",
        WRONG | FENCE,
        "nchw",
    ),
    window(
        "slices past the end are stored",
        "depthwise_window",
        "{{if (D::z % slices != 0 && ...) return;}}",
        WRONG | FENCE | RACE,
        "nhwc",
        slices=2,
    ),
    window(
        "every thread's slices are the first",
        "depthwise_window",
        "{{_ % Slices::tiles => 0}}",
        WRONG | RACE,
        "nchw",
    ),
    gradient(
        "slices of dy outside the volume are read",
        "depthwise_input",
        "load_window<Shape>(..., _ {{&& _(_)}})",
        WRONG | FENCE,
        "strides-dgrad-nchw",
    ),
    gradient(
        "slices of dx past the end are stored",
        "depthwise_input",
        "{{if (D::volume && ...) continue;}}",
        WRONG | FENCE | RACE,
        "strides-dgrad-nhwc",
        slices=2,
    ),
    gradient(
        "every thread's slices are the first",
        "depthwise_input",
        "{{_ % Slices::tiles => 0}}",
        WRONG | RACE,
        "far-dgrad-nchw",
        times=2,
    ),
    weights(
        "slices outside the volume are read",
        "walk_strips",
        "_(_) {{&& _(_)}});",
        WRONG | FENCE,
        "wgrad-nchw",
    ),
    weights(
        "every slice of dy meets the first of x",
        "walk_strips",
        "{{_ * D::stride}} - D::pad",
        WRONG,
        "wgrad-nhwc",
    ),
    patches(
        "pixels outside the volume are stored",
        "PatchPlace::holds",
        "{{static_cast<unsigned>(_ + _.d) < static_cast<unsigned>(Problem::layer_d) => true}}",
        WRONG | FENCE | RACE,
        "apart-dgrad-nchw",
    ),
    patches(
        "taps past the last are stored",
        "store_patches",
        "{{_ + _ >= Problem::k ||}}",
        WRONG | FENCE | RACE,
        "apart-dgrad-nchw",
    ),
    patches(
        "outputs past the last are stored",
        "store_patches",
        "{{if (_ >= _.count) continue;}}",
        WRONG | FENCE | RACE,
        "patches-dgrad-nchw",
    ),
)
