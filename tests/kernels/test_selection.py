"""What ``make test`` leaves to ``make test-all``, and that it leaves no kernel out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from leanconv.kernels import ALGORITHMS
from tests import collection, emulator, proof, selection
from tests.cases import TARGETS
from tests.kernels.test_algorithms import ACCEPTED, CHOSEN, MOST_WORK, covering, extremes
from tests.variants import VARIANTS


def test_a_cover_has_every_trait_and_little_more():
    items = [{1, 2}, {2, 3}, {3}, {1, 2, 3, 4}, {5}, set()]
    assert selection.cover(items, lambda item: item) == [{1, 2, 3, 4}, {5}]
    assert selection.cover([], lambda item: item) == []
    assert selection.cover([(3, "a"), (1, "a"), (2, "a")], lambda item: item[1], lambda item: item[0]) == [(1, "a")]


def test_what_is_left_out_is_marked_and_nothing_else():
    made = selection.marked(["a", "b", "c"], ["b"], lambda item: ((item,), item))
    assert [[mark.name for mark in each.marks] for each in made] == [["exhaustive"], [], ["exhaustive"]]


def test_every_kernel_is_executed():
    """Each header with a kernel, and every layer, layout, direction and element type of every algorithm."""
    chosen = list(covering())
    launched = {
        launch.header
        for algorithm, case in chosen
        for launch in algorithm.plan(
            case.problem, next(iter(algorithm.configs(case.problem, TARGETS[0]))), TARGETS[0]
        ).every_launch
    }
    assert {f"kernels/{algorithm.family}/{algorithm.stem}.cuh" for algorithm in ALGORITHMS} <= launched

    def met(pairs):
        return {(a.stem, trait) for a, case in pairs for trait in selection.traits(a, case)}

    assert met(chosen) == met(ACCEPTED)


def test_plans_are_played_in_two_orders_by_turns(monkeypatch: pytest.MonkeyPatch):
    """Over all layers each order is played about as often; an algorithm's layer of most work in all of them."""
    assert set(MOST_WORK) == {algorithm.stem for algorithm in VARIANTS}
    plans = [a.plan(c.problem, next(iter(a.configs(c.problem, TARGETS[0]))), TARGETS[0]) for a, c in CHOSEN]
    monkeypatch.setattr(proof, "every_order", False)
    played = [order for plan in plans for order in proof.orders_of(plan)]
    assert len(played) == 2 * len(plans)
    assert min(played.count(order) for order in emulator.ORDERS) > 0.6 * len(plans)
    met: list[str] = []
    monkeypatch.setattr(emulator, "run_plan", lambda plan, values, orders: met.extend(orders))
    proof.run_on_emulator(plans[0], {})
    proof.run_in_another_order(plans[0], {})
    assert sorted(met) == sorted(emulator.ORDERS)
    monkeypatch.setattr(proof, "every_order", True)
    assert proof.orders_of(plans[0]) == emulator.ORDERS


def test_the_number_of_emulated_layers_stays_bounded():
    """A new algorithm adds what it has to cover, at most this many layers; more would be a matter of its own tests."""
    chosen = list(covering())
    for algorithm in VARIANTS:
        assert sum(a is algorithm for a, _ in chosen) <= 130, algorithm.stem
    left = [each for each in extremes() if not each.marks]
    assert 0 < len(left) <= 25 * len(VARIANTS)


def test_a_third_of_large_groups_and_the_first_of_each_algorithm_stay():
    class Item(SimpleNamespace):
        def add_marker(self, mark):
            self.keywords[mark.name] = True

    def made(function, algorithm, number):
        params = {"algorithm": SimpleNamespace(stem=algorithm)} if algorithm else {}
        nodeid = f"tests/test_file.py::{function}[{algorithm}-{number}]"
        return Item(nodeid=nodeid, keywords={}, callspec=SimpleNamespace(params=params), of=algorithm)

    items = [made("test_right_on_emulator", name, i) for name in ("a", "b", "") for i in range(300)]
    others = [made("test_else", "a", i) for i in range(9)]
    collection.thin_out([*items, *others])
    stay = [item for item in items if not item.keywords]
    assert items[0] in stay and items[300] in stay and not any(item.keywords for item in others)
    assert all(80 < sum(item.of == name for item in stay) < 120 for name in ("a", "b", ""))
