"""What a break is: a patch of a kernel, and how it must show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.kernels.patching import Patch


class Outcome(str):
    """A regular expression of what the emulator or the check reports; ``one | other``: either of them."""

    def __or__(self, other: str) -> Outcome:
        return Outcome(f"{self}|{other}")


#: Bad data may also be used as an address before it reaches the output.
FENCE = Outcome("use-after-poison|SEGV")
RACE = Outcome("a race: thread orders|misaligned") | FENCE
WRONG = Outcome("error .* exceeds|between the rows") | FENCE
GONE = Outcome("has left the kernel")
STUCK = Outcome("the cluster is stuck")
BARRIER = Outcome(r"emulator: barrier \d")
MISALIGNED = Outcome("misaligned")
#: A copy to what threads have loaded from and no product has taken.
NOT_TAKEN = Outcome("no product has used it")
#: A product, a copy or a barrier that is used against its rules.
RULE = Outcome("wgmma|bulk|mbarrier|cp_async|barrier|ld_shared|deadlock|fence")
#: A product, a copy or a barrier that is still under way.
UNDER_WAY = Outcome("wgmma|mbarrier|cp.async.bulk|is stuck")


@dataclass(frozen=True)
class Break:
    """With ``patch``, ``algorithm`` must fail one of ``cases``, and report ``how``.

    ``tuning``: values that the configuration has, where the best guess would not run the broken code.
    """

    algorithm: str
    patch: Patch
    how: str
    cases: tuple[str, ...]
    tuning: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.algorithm}: {self.patch.name}"


def breaks_of(algorithm: str, case: str = "{}", **usual: Any) -> Callable[..., Break]:
    """Makes the breaks of an algorithm; ``case`` completes the names of their cases, ``usual`` is their tuning."""

    def of(
        name: str,
        where: str,
        change: str,
        how: str,
        *cases: str,
        times: int = 1,
        only: int | None = None,
        **tuning: Any,
    ) -> Break:
        names = tuple(case.format(each) for each in cases)
        return Break(algorithm, Patch(name, where, change, times, only), how, names, tuple((usual | tuning).items()))

    return of
