"""Loss curves of the training after pruning."""

from optimum_prune.plots.recovery import draw_recovery
from optimum_prune.recovery.report import Losses, RecoveryReport
from tests.reports import recovery, report


def lines(axes) -> dict[str, list[list[float]]]:
    return {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}


def drawn_lines(drawn, *recoveries: RecoveryReport):
    return [lines(axes) for axes in drawn(draw_recovery, report(recovery=list(recoveries)))]


def test_curves_and_the_step_that_was_kept(drawn):
    (found,) = drawn_lines(drawn, recovery())
    assert found == {
        "trained on": [[10, 3.5], [20, 3.25], [30, 3.0]],
        "held out": [[0, 4.0], [20, 3.5], [30, 3.75]],
        "kept: step 20": [[20, 3.5]],
    }


def test_a_distance_in_the_loss_has_no_known_start(drawn):
    (found,) = drawn_lines(drawn, recovery(before=Losses(4.0, 0.5)))
    assert found["held out"] == [[20, 3.5], [30, 3.75]]


def test_the_dense_model_beside_it(drawn):
    dense = recovery(before=Losses(3.0), curve=[{"step": 20, "held_out": 2.75}])
    (found,) = drawn_lines(drawn, recovery(control=dense))
    assert found["held out, dense trained alike"] == [[0, 3.0], [20, 2.75]]


def test_no_star_where_nothing_was_kept_and_a_panel_for_every_training(drawn):
    first, second = drawn_lines(drawn, recovery(kept=False, best_step=0), recovery())
    assert list(first) == ["trained on", "held out"] and "kept: step 20" in second
