"""native_gemm_planes, broken on purpose."""

from __future__ import annotations

from tests.kernels.breaks.base import FENCE, GONE, RACE, RULE, STUCK, UNDER_WAY, WRONG, breaks_of

planes = breaks_of("native_gemm_planes", "{}-nchw", columns=64, split=1)

ODD, LONG, GROUPS = "float16-images-odd", "float16-images-long", "bfloat16-images-groups"
ACCUMULATE, GRADIENT = "bfloat16-images-pairs", "float16-gradient-images"

BREAKS = (
    planes(
        "products do not wait for the copies",
        "consume_planes",
        "{{mbarrier_wait_parity(_.full(...), ...);}}",
        UNDER_WAY | RACE | WRONG | "nobody has waited",
        ODD,
    ),
    planes(
        "copies do not wait for a free stage",
        "produce_planes",
        "{{mbarrier_wait_parity(_.empty(...), ...);}}",
        UNDER_WAY | RACE | RULE,
        ODD,
        stages=3,
    ),
    planes(
        "fragments change while products read them",
        "consume_planes",
        "{{wgmma_wait_group<0>(...);}}",
        UNDER_WAY | RULE,
        ODD,
        times=2,
        only=1,
    ),
    planes(
        "sums are stored before the products are done",
        "consume_planes",
        "{{wgmma_wait_group<0>(...);}}",
        UNDER_WAY | RULE,
        ODD,
        times=2,
        only=2,
    ),
    planes(
        "outputs lie where stages are still read",
        "released",
        "{{mbarrier_wait_parity(...);}}",
        UNDER_WAY | RACE | RULE,
        ODD,
        stages=3,
    ),
    planes(
        "outputs are copied before they are there",
        "store_planes",
        "{{barrier_sync(...);}}",
        RACE | WRONG,
        ODD,
    ),
    planes("copies do not see the outputs", "store_planes", "{{fence_proxy_async();}}", "fence_proxy_async", ODD),
    planes(
        "a thread leaves before its copies have read",
        "store_planes",
        "{{cp_async_bulk_wait_group_read<0>(); => ;}}",
        "without having waited for its copy",
        ODD,
    ),
    planes(
        "channels past the last are what lay there",
        "PlaneRows::pair",
        "{{exists ? _(...) : 0 => __byte_perm(from[k][i][0], from[k][i][1], 0x5410)}}",
        WRONG,
        ODD,
    ),
    planes("pairs the other way round", "PlaneRows::pair", "__byte_perm(..., {{0x5410 => 0x1054}})", WRONG, ODD),
    planes("every image is the first", "produce_planes", "{{(tile.image + i) => tile.image}}", WRONG, LONG, ODD),
    planes("pixels of the first group", "produce_planes", "{{tile.group * Problem::group_c +}} c", WRONG, GROUPS),
    planes(
        "outputs of the first group", "PlaneOutputs", "{{tile.group * Problem::group_k +}} first", WRONG | RACE, GROUPS
    ),
    planes(
        "what the output holds is not there yet",
        "load_held",
        "{{mbarrier_wait_parity(...);}}",
        UNDER_WAY | RACE | WRONG | "nobody has waited",
        ACCUMULATE,
    ),
    planes(
        "every image adds what the first one holds", "held", "else return at {{+ image * apart}};", WRONG, ACCUMULATE
    ),
    planes("all steps multiply the first channels", "consume_planes", "{{Ring::step *}} k", WRONG, GRADIENT, ODD),
    planes(
        "images past the end are stored",
        "PlaneOutputs",
        "{{min(Tile::of_rows, tile.count - warpgroup * Tile::of_rows) => Tile::of_rows}}",
        FENCE | WRONG | RACE,
        ODD,
    ),
    planes(
        "filters past the end are stored",
        "PlaneOutputs",
        "{{min(Ring::columns, Problem::group_k - first) => Ring::columns}}",
        FENCE | WRONG | RACE,
        ODD,
    ),
    planes(
        "every CTA of a cluster stores the first filters",
        "consume_planes",
        "{{tile.part *}} (count / split)",
        WRONG,
        ODD,
        split=2,
    ),
    planes(
        "a CTA leaves while others read its sums",
        "consume_planes",
        "{{meet_in_cluster();}}",
        GONE | STUCK | RACE,
        ODD,
        times=2,
        only=2,
        split=2,
    ),
)
