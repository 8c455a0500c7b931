"""Structured AFR against plain loops in float64, and METHODS.md 3's identities."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportOptionalCall=false

import itertools
import statistics as plain_statistics

import pytest
import torch

from optimum_prune import CalibrationConfig, InvalidConfig, PruningConfig, registry
from optimum_prune.binding import bind, select
from optimum_prune.objectives import LOSS
from optimum_prune.pipeline import prune
from optimum_prune.scorers.afr import SCORER, afr, combine
from optimum_prune.scorers.base import Part, Scorer, Statistics, Units, no_weights
from optimum_prune.scoring import score_groups
from tests.drawn import data_for
from tests.models import VARIANTS, llama, source
from tests.scorers.plain import forward, gradients, in_float64, inputs_of, loss, predicted

CHANNELS, HIDDEN = 12, 50
WEIGHTS = 3 * HIDDEN
"""Of one unit of `gated`: more than 100, so that the 2nd percentile leaves some out."""


def part(rows, columns, seed, scales=None) -> Part:
    """Return a weight `(rows, columns)` with gradients and norms."""
    generator = torch.Generator().manual_seed(seed)
    weight, *found = (torch.randn(rows, columns, generator=generator) for _ in range(3))
    norm = torch.rand(columns, generator=generator) + 0.1
    return Part(weight, Statistics(generator, dict(zip(("loss", "energy"), found, strict=True)), norm=norm))


def gated(hidden=HIDDEN, seed=0) -> Units:
    """Return a gated MLP of 12 channels."""
    writers = [part(CHANNELS, hidden, seed), part(CHANNELS, hidden, seed + 1)]
    return Units(writers, [part(hidden, CHANNELS, seed + 2)], CHANNELS)


def entries(units: Units, values) -> list[list[float]]:
    """Return the values `(part) -> (d_out, d_in)` of each unit's weights; every unit is one row or column."""
    writers = [values(part).double().tolist() for part in units.writers]
    readers = [values(part).double().tolist() for part in units.readers]
    return [
        [value for matrix in writers for value in matrix[u]] + [row[u] for matrix in readers for row in matrix]
        for u in range(units.number)
    ]


def refer_values(kind):
    return {
        "feature": lambda part: (part.weight.double() * part.statistics.gradients["energy"]).abs(),
        "activation": lambda part: part.weight.double().abs() * part.statistics.norm,
        "magnitude": lambda part: part.weight.double().abs(),
    }[kind]


def snip_values(part):
    return part.weight.double() * part.statistics.gradients["loss"]


def z(values):
    mean, deviation = plain_statistics.fmean(values), plain_statistics.pstdev(values)
    return [(value - mean) / deviation for value in values]


def terms_loops(units, kind, power, signed, trim):
    """R_u and S_u of every unit (METHODS.md 3)."""
    c = entries(units, snip_values)
    top = max(abs(value) for row in c for value in row)
    c = [[(1 if value > 0 else -1) * (abs(value) / top) ** power for value in row] for row in c]
    spread = plain_statistics.pstdev([value for row in c for value in row])
    terms = []
    for row, r in zip(c, entries(units, refer_values(kind)), strict=True):
        mean = sum(row) if signed else sum(map(abs, row))
        if trim is not None:
            low, high = (round(len(r) * share / 100) for share in trim)
            r = sorted(r)[low:high]
        terms.append([sum(r) / len(r), abs(mean) / len(row) / spread])
    return terms


@pytest.mark.parametrize("kind", ["feature", "activation", "magnitude"])
@pytest.mark.parametrize(
    ("power", "signed", "trim"),
    list(itertools.product([1, 2, 3.5], [True, False], [None, (2, 98), [10, 60]])),
)
def test_terms_equal_plain_loops(kind, power, signed, trim):
    units = gated()
    got = afr(kind, power, signed, trim).score_units(units)
    assert got.shape == (CHANNELS, 2) and got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor(terms_loops(units, kind, power, signed, trim)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("together", [False, True])
def test_terms_are_standardised_inside_of_a_layer_or_over_all(together):
    scorer, groups = afr("feature"), [gated(seed=seed) for seed in (0, 10, 20)]
    terms = [terms_loops(units, "feature", 2, True, None) for units in groups]
    pools = [list(itertools.chain(*terms))] if together else terms
    expected = [[sum(pair) for pair in zip(*map(z, zip(*pool, strict=True)), strict=True)] for pool in pools]
    got = combine([scorer.score_units(units) for units in groups], together)
    assert [len(scores) for scores in got] == [CHANNELS] * 3
    torch.testing.assert_close(torch.cat(got), torch.tensor(list(itertools.chain(*expected))), rtol=1e-3, atol=1e-4)


def test_a_term_that_is_the_same_everywhere_says_nothing():
    scores = torch.tensor([[1.0, 5.0], [2.0, 5.0], [4.0, 5.0]])
    (got,) = combine([scores], False)
    assert got.tolist() == pytest.approx(z([1.0, 2.0, 4.0]))


def test_without_repairs_it_is_the_naive_sum():
    """Mean of r plus mean of |c| over a unit, each standardised: scaling by m_l and the deviation drops out."""
    units, weights = gated(), range(WEIGHTS)
    r, c = entries(units, refer_values("feature")), entries(units, snip_values)
    naive_r = [sum(r[u][i] for i in weights) / WEIGHTS for u in range(CHANNELS)]
    naive_c = [sum(abs(c[u][i]) for i in weights) / WEIGHTS for u in range(CHANNELS)]
    expected = [a + b for a, b in zip(z(naive_r), z(naive_c), strict=True)]
    (got,) = combine([afr("feature", power=1, signed=False).score_units(units)], False)
    assert got.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("power", [1, 2, 3])
def test_opposite_scores_cancel(power):
    units = gated()
    c = torch.tensor([0.3, -0.3] * (HIDDEN // 2))
    for writer in units.writers:
        writer.statistics.gradients["loss"][4] = c / writer.weight[4]
    (reader,) = units.readers
    reader.statistics.gradients["loss"][:, 4] = c / reader.weight[:, 4]
    signed, absolute = (afr(power=power, signed=signed).score_units(units)[:, 1] for signed in (True, False))
    assert signed[4] < 1e-6 and (signed[5:] > 1e-3).all()
    assert absolute[4] > 1e-3


class TestOutlier:
    """One weight whose r is 1e6, in the unit whose r is the lowest otherwise; units are far apart."""

    @staticmethod
    def ranks(hidden, outlier, trim):
        units = gated(hidden)
        (reader,) = units.readers
        for u in range(CHANNELS):
            for writer in units.writers:
                writer.statistics.gradients["energy"][u] *= 2.0**u
            reader.statistics.gradients["energy"][:, u] *= 2.0**u
        if outlier:
            writer = units.writers[0]
            writer.statistics.gradients["energy"][0, 7] = 1e6 / writer.weight[0, 7]
        r = afr("feature", trim=trim).score_units(units)[:, 0]
        return r.argsort().tolist()

    def test_changes_no_rank_where_it_is_trimmed(self):
        assert self.ranks(HIDDEN, True, (2, 98)) == self.ranks(HIDDEN, False, (2, 98)) == list(range(CHANNELS))

    def test_is_on_top_where_it_is_not(self):
        assert self.ranks(HIDDEN, True, None) == [*range(1, CHANNELS), 0]

    @pytest.mark.parametrize(("hidden", "seen"), [(8, True), (9, False)])
    def test_of_few_weights_two_percent_are_none(self, hidden, seen):
        """24 weights a unit: 2 % are less than half of one, and nothing is left out; 27: one is."""
        on_top = self.ranks(hidden, True, (2, 98))[-1] == 0
        assert on_top == seen

    def test_something_is_always_left(self):
        assert torch.isfinite(afr("feature", trim=(50, 50.1)).score_units(gated())).all()


def test_euler():
    """What the gradient says of a channel's column of down_proj, it says of its row of up_proj (no biases)."""
    model, seen = llama(), {}
    data = data_for(model)

    def look(units):
        _, up = units.writers
        seen[up.weight] = [(p.weight * p.statistics.gradients["loss"]) for p in (up, *units.readers)]
        return torch.zeros(units.number)

    groups = select(bind(model), ["mlp_channel"])
    score_groups(model, groups, [Scorer("probe", no_weights, "", score_units=look, objectives=(LOSS,))], data=data)
    assert len(seen) == 3
    for of_up, of_down in seen.values():
        assert of_up.sum(dim=1).abs().max() > 1e-3
        torch.testing.assert_close(of_up.sum(dim=1), of_down.sum(dim=0), rtol=1e-3, atol=1e-6)


def energy(model, data, i):
    """||F||_F^2 / 2 of the states that the output embedding reads, of one sample."""
    states = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: states.append(args[0]))
    forward(model, data, i)
    handle.remove()
    return states[0].square().sum() / 2


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "feature") for name in ("llama-tied-biased", "opt", "t5", "llava")),
        *((name, "activation") for name in ("llama-gqa", "opt", "t5-gated", "llava")),
        ("opt", "magnitude"),
    ],
)
def test_of_a_model(name, kind):
    """Gated and plain MLPs; gradients of whole backwards and inputs of whole forwards, padding nowhere."""
    model = VARIANTS[name]()
    data = data_for(model)
    samples, tokens = range(len(data.samples)), predicted(in_float64(model), data)
    of_loss = gradients(model, lambda m: sum(loss(m, data, i) for i in samples) / tokens)
    of_energy = gradients(model, lambda m: sum(energy(m, data, i) for i in samples) / tokens)
    norms = {path: x.square().mean(dim=0).sqrt() for path, x in inputs_of(model, data).items()}

    def known(path, linear):
        found = {"loss": of_loss[path], "energy": of_energy[path]}
        return Part(linear.weight.detach(), Statistics(torch.Generator(), found, norm=norms[path]))

    groups = select(bind(model), ["mlp_channel"])
    for batch_size in (1, 3):
        (got,) = score_groups(model, groups, [afr(kind)], data=data, batch_size=batch_size)
        for group in groups:
            parts = [known(path, linear) for path, linear in zip(group.linear_names, group.linears, strict=True)]
            units = Units(parts[: len(group.writers)], parts[len(group.writers) :], group.num_units)
            expected = torch.tensor(terms_loops(units, kind, 2, True, None))
            torch.testing.assert_close(got[group.name], expected, rtol=2e-3, atol=2e-5 * expected.max().item())


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"refer": "features"}, "Unknown refer of afr 'features'; supported: 'activation', 'feature', 'magnitude'"),
            ({"refer": ["feature"]}, "Unknown refer of afr"),
            ({"power": 0}, r"power of afr must be a finite number > 0, got 0\."),
            ({"power": -2}, "power of afr must be a finite number > 0, got -2"),
            ({"power": "2"}, "power of afr must be a finite number > 0, got '2'"),
            ({"power": True}, "power of afr must be a finite number > 0, got True"),
            ({"power": float("nan")}, "power of afr must be a finite number > 0, got nan"),
            ({"power": float("inf")}, "power of afr must be a finite number > 0, got inf"),
            ({"signed": 1}, "signed of afr must be true or false, got 1"),
            ({"signed": "yes"}, "signed of afr must be true or false, got 'yes'"),
            ({"trim": 2}, r"trim of afr must be null or two percentiles, e\.g\. \[2, 98\], got 2"),
            ({"trim": [2]}, r"two percentiles, e\.g\. \[2, 98\], got \[2\]"),
            ({"trim": ["2", 98]}, "trim of afr must be null or two percentiles"),
            ({"trim": [98, 2]}, r"0 <= low < high <= 100, got \[98, 2\]"),
            ({"trim": [2, 101]}, "0 <= low < high <= 100"),
            ({"trim": [float("nan"), 98]}, "0 <= low < high <= 100"),
            ({"powr": 2}, "Unknown option of scorer 'afr' 'powr'; supported: .* Did you mean 'power'"),
        ],
        ids=str,
    )
    def test_refused_before_a_weight_changes(self, options, message):
        model = llama()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        calibration = CalibrationConfig(source(model), num_samples=4)
        config = PruningConfig(scorer="afr", sparsity=0.3, scorer_options=options, calibration=calibration)
        with pytest.raises(InvalidConfig, match=message):
            prune(model, config)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    def test_what_it_looks_at_follows(self):
        assert [o.name for o in afr("feature").objectives] == ["loss", "energy"] and afr("feature").inputs is None
        assert [o.name for o in afr("magnitude").objectives] == ["loss"] and afr("magnitude").inputs is None
        assert [o.name for o in SCORER.objectives] == ["loss"] and SCORER.inputs == "norm"
        again = registry.load("scorers", "afr").with_options({"refer": "feature"}).with_options({"power": 1})
        assert again.inputs == "norm"  # options are not added up

    def test_defaults_are_those_of_the_signature(self):
        units = gated()
        assert torch.equal(SCORER.score_units(units), afr("activation", 2.0, True, None).score_units(units))


def test_only_mlps_lose_units_unless_others_are_named():
    model = llama()
    calibration = CalibrationConfig(source(model), num_samples=4)
    config = PruningConfig(scorer="afr", sparsity=0.3, calibration=calibration)
    report = prune(model, config)
    assert report.units == ["mlp_channel"] and report.allocation == "uniform"
    assert {group.after for group in report.groups} == {40}
    named = PruningConfig(scorer="afr", sparsity=0.3, units=["kv_group", "mlp_channel"], calibration=calibration)
    assert {*prune(llama(), named).units} == {"kv_group", "mlp_channel"}
