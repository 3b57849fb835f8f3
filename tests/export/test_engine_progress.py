# SPDX-License-Identifier: Apache-2.0
"""The fraction of a build that is done, from nested phases."""

from hypothesis import given
from hypothesis import strategies as st

from dspark_trt.export.engines.progress import PhaseTree


def test_a_running_phase_fills_its_parent_s_current_step() -> None:
    tree = PhaseTree()
    assert (tree.fraction, tree.current) == (0.0, "")
    tree.start("build", None, 4)
    tree.step("build", 0)
    tree.start("optimise", "build", 2)
    tree.step("optimise", 0)
    assert (tree.fraction, tree.current) == (0.375, "optimise")  # 1/4 + 1/2 of 1/4
    tree.finish("optimise")
    tree.step("build", 1)
    assert (tree.fraction, tree.current) == (0.5, "build")


def test_steps_beyond_those_announced_and_empty_phases_stay_in_range() -> None:
    tree = PhaseTree()
    tree.start("build", None, 0)
    tree.step("build", 9)
    assert tree.fraction == 1.0


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["start", "step", "finish"])))
)
def test_never_falls_and_stays_in_range(events: list[tuple[str, str]]) -> None:
    tree, running, last = PhaseTree(), dict[str, int](), 0.0
    for name, event in events:
        if event == "start" and name not in running:
            parent = next(reversed(running), None)
            running[name] = 0
            tree.start(name, parent, 3)
        elif event == "step" and name in running:
            tree.step(name, running[name])
            running[name] += 1
        elif event == "finish" and name in running:
            del running[name]
            tree.finish(name)
        assert last <= tree.fraction <= 1.0
        last = tree.fraction
