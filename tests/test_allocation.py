"""How many units go, and which: published counts, floors, exactness under ties, and what is refused."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from optimum_prune import PruningConfig, registry
from optimum_prune.allocation import Budget, Size, budgets, choose, coupled_sparsities, gamma_auto
from optimum_prune.binding import bind
from optimum_prune.bounds import why_none
from optimum_prune.errors import InvalidConfig
from optimum_prune.sizes import build_skeleton
from optimum_prune.structured import find_targets

LLAMA_8B = LlamaConfig(
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
)
LLAMA_3B = LlamaConfig(
    num_hidden_layers=28,
    hidden_size=3072,
    intermediate_size=8192,
    num_attention_heads=24,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    tie_word_embeddings=True,
)


def from_config(config):
    """Write a Llama's groups down from its numbers, as METHODS.md counts them."""
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    attention = 2 * (heads // groups + 1) * size * groups * config.hidden_size
    mlp = 3 * config.intermediate_size * config.hidden_size
    return [
        Size(f"{layer}.{unit}", unit, number, weights)
        for layer in range(config.num_hidden_layers)
        for unit, number, weights in (
            ("kv_group", groups, attention),
            ("mlp_channel", config.intermediate_size, mlp),
        )
    ]


def channels(*numbers):
    return [Size(f"layers.{i}.mlp", "mlp_channel", number, 96 * number) for i, number in enumerate(numbers)]


def kv_groups(*numbers):
    return [Size(f"layers.{i}.self_attn", "kv_group", number, 640 * number) for i, number in enumerate(numbers)]


def why(groups, sparsity, allocation, **options):
    """Return why no unit of a kind goes, by kind."""
    plan = budgets(groups, sparsity, allocation, **options)
    return {unit: why_none([size for size in groups if size.unit == unit], budget) for unit, budget in plan.items()}


def draw(*numbers, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(number, generator=generator) for number in numbers]


def removed(scores, kept):
    return [sorted(set(range(len(s))) - set(k.tolist())) for s, k in zip(scores, kept, strict=True)]


class TestPublishedNumbers:
    """The table of METHODS.md 2, and gamma of arXiv 2509.14230."""

    TABLE = (
        (LLAMA_8B, 3.36, 0.2, 17, 106_078),
        (LLAMA_8B, 3.36, 0.4, 35, 212_157),
        (LLAMA_8B, 3.36, 0.5, 44, 265_197),
        (LLAMA_3B, 3.0, 0.5, 44, 137_625),
    )

    @pytest.mark.parametrize(("config", "gamma"), [(LLAMA_8B, 3.36), (LLAMA_3B, 3.0)], ids=["8B", "3B"])
    def test_gamma_auto(self, config, gamma):
        skeleton = build_skeleton(LlamaForCausalLM, config)
        sizes = [Size(group.name, group.unit, group.num_units, group.weights) for group in bind(skeleton)]
        assert [(s.unit, s.num_units, s.weights) for s in sizes] == [
            (s.unit, s.num_units, s.weights) for s in from_config(config)
        ]
        ntk = registry.load("scorers", "ntk")
        targets = find_targets(skeleton, PruningConfig(sparsity=0.2), ntk)
        assert targets.allocation == "gamma"
        assert targets.gamma == {"model.layers": pytest.approx(gamma, rel=1e-14)}

    @pytest.mark.parametrize(("config", "gamma", "sparsity", "attention", "mlp"), TABLE)
    @pytest.mark.parametrize("given", ["published gamma", "gamma auto"])
    def test_counts(self, config, gamma, sparsity, attention, mlp, given):
        sizes = from_config(config)
        if given == "gamma auto":
            gamma = gamma_auto(
                sizes[0].weights, sizes[1].weights, config.num_attention_heads // config.num_key_value_heads
            )
        plan = budgets(sizes, sparsity, "gamma", gamma=gamma)
        assert (plan["kv_group"].remove, plan["mlp_channel"].remove) == (attention, mlp)
        assert (plan["kv_group"].floor, plan["mlp_channel"].floor) == (1, 8)
        assert (plan["kv_group"].round_to, plan["mlp_channel"].round_to) == (1, 8)

    def test_totals(self):
        for config, groups, width in ((LLAMA_8B, 256, 458_752), (LLAMA_3B, 224, 229_376)):
            totals = {"kv_group": 0, "mlp_channel": 0}
            for size in from_config(config):
                totals[size.unit] += size.num_units
            assert totals == {"kv_group": groups, "mlp_channel": width}

    def test_gamma_auto_is_capped_by_the_ratio_of_weights(self):
        assert gamma_auto(100, 420, 4) == pytest.approx(4.2 * 4 / 5)
        assert gamma_auto(100, 300, 3) == 3.0
        assert gamma_auto(100, 300, 1) == 3.0  # multi-head attention: min(1, 4 / 2)


class TestCoupling:
    @pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.29, 0.5, 0.7])
    @pytest.mark.parametrize("gamma", [0.25, 1.0, 3.36])
    def test_meets_the_budget(self, sparsity, gamma):
        attention, mlp = coupled_sparsities(sparsity, gamma, 1000, 4200, 0.875, 0.999)
        assert attention * 1000 + mlp * 4200 == pytest.approx(sparsity * 5200)
        assert mlp == pytest.approx(gamma * attention) or mlp == 0.999 or attention == 0.875

    def test_clamps_the_mlp_and_solves_attention_from_the_budget(self):
        plan = budgets(from_config(LLAMA_8B), 0.9, "gamma", gamma=3.36)
        attention, mlp = plan["kv_group"].sparsity, plan["mlp_channel"].sparsity
        assert 3.36 * 0.9 * 5.2 / (1 + 3.36 * 4.2) > 1  # what gamma alone would ask of the MLP
        assert mlp == 1 - 8 / 14336
        assert (attention + 4.2 * mlp) / 5.2 == pytest.approx(0.9)
        assert plan["mlp_channel"].remove == 32 * (14336 - 8)
        assert plan["kv_group"].remove == math.floor(attention * 256)

    def test_clamps_attention_and_solves_the_mlp_from_the_budget(self):
        """With gamma below 1, it is the heads of which more would be asked than there is."""
        groups = [
            Size("encoder.0.self", "kv_group", 8, 8 * 768, tied=True),
            Size("encoder.0.mlp", "mlp_channel", 48, 3072),
        ]
        plan = budgets(groups, 0.85, "gamma", gamma=0.5)
        attention, mlp = plan["kv_group"].sparsity, plan["mlp_channel"].sparsity
        assert 0.85 * 9216 / (6144 + 0.5 * 3072) > 1  # what gamma alone would ask of the heads
        assert attention == 7 / 8 and plan["kv_group"].remove == [7]
        assert (6144 * attention + 3072 * mlp) / 9216 == pytest.approx(0.85)

    @pytest.mark.parametrize("tied", [False, True])
    @given(
        heads=st.integers(1, 16),
        width=st.integers(1, 64),
        sparsity=st.floats(0, 0.999),
        gamma=st.floats(0.05, 20),
    )
    def test_what_is_asked_is_there(self, heads, width, sparsity, gamma, tied):
        """No kind is asked for more than its floors let go, and both together are asked for the sparsity."""
        groups = [Size("0.self", "kv_group", heads, 640 * heads, tied), Size("0.mlp", "mlp_channel", width, 96 * width)]
        try:
            plan = budgets(groups, sparsity, "gamma", gamma=gamma)
        except InvalidConfig as refusal:
            assert "Lower the sparsity" in str(refusal)
            return
        asked = sum(size.weights * plan[size.unit].sparsity for size in groups)
        assert asked == pytest.approx(sparsity * sum(size.weights for size in groups))
        if heads > 1 and width > 8:
            assert plan["kv_group"].sparsity < 1 and plan["mlp_channel"].sparsity < 1

    def test_one_kind_alone_is_not_coupled(self):
        for allocation in ("gamma", "global"):
            plan = budgets(channels(64, 64), 0.25, allocation, gamma=3.36)
            assert plan == {"mlp_channel": Budget(0.25, 32, 8, 8)}

    def test_global_asks_the_same_of_both_kinds(self):
        plan = budgets(kv_groups(4, 4) + channels(64, 64), 0.25, "global", gamma=3.36)
        assert (plan["kv_group"].remove, plan["mlp_channel"].remove) == (2, 32)

    def test_gamma_one_is_global(self):
        groups = kv_groups(8, 8) + channels(64, 64)
        assert budgets(groups, 0.25, "gamma", gamma=1.0) == budgets(groups, 0.25, "global")


class TestCounts:
    def test_global_takes_the_floor_of_the_exact_count(self):
        assert budgets(channels(100), 0.299, "global")["mlp_channel"].remove == 29
        assert 0.29 * 100 < 29  # in floating point
        assert budgets(channels(100), 0.29, "global")["mlp_channel"].remove == 29
        assert budgets(channels(40, 60), 0.29, "global")["mlp_channel"].remove == 29

    def test_uniform_takes_the_nearest_count_in_every_group(self):
        plan = budgets(kv_groups(2, 4, 5, 8) + channels(64, 40), 0.3, "uniform", round_to=1)
        assert plan["kv_group"].remove == [1, 1, 2, 2]  # 0.6, 1.2, 1.5, 2.4
        assert plan["mlp_channel"].remove == [19, 12]

    def test_uniform_stops_at_the_floor(self):
        plan = budgets(kv_groups(1, 2, 8) + channels(8, 10, 100), 0.9, "uniform", round_to=1)
        assert plan["kv_group"].remove == [0, 1, 7]
        assert plan["mlp_channel"].remove == [0, 2, 90]

    @pytest.mark.parametrize("allocation", ["uniform", "global", "gamma"])
    def test_sparsity_zero_removes_nothing(self, allocation):
        groups = kv_groups(1, 4) + channels(37, 8)
        scores = draw(*(group.num_units for group in groups))
        plan = budgets(groups, 0.0, allocation)
        for i, unit in ((0, "kv_group"), (2, "mlp_channel")):
            kept = choose(scores[i : i + 2], plan[unit])
            assert [k.tolist() for k in kept] == [list(range(len(s))) for s in scores[i : i + 2]]


class TestChoice:
    def test_keeps_the_best(self):
        scores = [torch.tensor([0.5, 0.1, 0.9, 0.3]), torch.tensor([0.2, 0.8, 0.7, 0.6])]
        assert [k.tolist() for k in choose(scores, Budget(0.375, 3, 1, 1))] == [[0, 2], [1, 2, 3]]
        assert [k.tolist() for k in choose(scores, Budget(0.375, [1, 2], 1, 1))] == [[0, 2, 3], [1, 2]]

    def test_the_best_of_every_group_is_exempt(self):
        poor, rich = torch.tensor([0.1, 0.3, 0.2]), torch.tensor([9.0, 7.0, 8.0, 6.0])
        assert [k.tolist() for k in choose([poor, rich], Budget(0.6, 4, 1, 1))] == [[1], [0, 2]]
        assert [k.tolist() for k in choose([poor, rich], Budget(0.7, 5, 1, 1))] == [[1], [0]]

    def test_mlp_floor(self):
        scores = [torch.arange(20.0), 100 + torch.arange(20.0)]
        kept = choose(scores, Budget(0.5, 20, 8, 1))
        assert [k.tolist() for k in kept] == [list(range(12, 20)), list(range(8, 20))]

    @pytest.mark.parametrize("value", [0.0, 1.0, 1e-30])
    def test_exact_counts_where_all_scores_are_equal(self, value):
        numbers = [64, 48, 100, 8]
        scores = [torch.full((number,), value) for number in numbers]
        kept = choose(scores, Budget(0.5, 110, 8, 1))
        assert sum(numbers) - sum(map(len, kept)) == 110
        assert all(torch.equal(a, b) for a, b in zip(kept, choose(scores, Budget(0.5, 110, 8, 1)), strict=True))
        assert [len(k) for k in choose(scores, Budget(0.5, [10, 20, 30, 0], 8, 1))] == [54, 28, 70, 8]

    def test_exact_counts_at_full_size(self):
        scores = [torch.randint(0, 5, (14336,), generator=torch.Generator().manual_seed(i)).float() for i in range(32)]
        plan = budgets(from_config(LLAMA_8B), 0.2, "gamma", gamma=3.36, round_to=1)
        kept = choose(scores, plan["mlp_channel"])
        assert sum(map(len, kept)) == 458_752 - 106_078
        gone = torch.cat([torch.ones(14336, dtype=torch.bool).index_fill(0, k, False) for k in kept])
        values = torch.cat(scores)
        assert values[gone].max() <= values[~gone].min()  # no score was ever preferred to a better one

    def test_rounding_spares_the_best_of_the_condemned(self):
        scores = [torch.tensor([5.0, 1, 7, 3, 8, 2, 6, 4])]
        assert removed(scores, choose(scores, Budget(0.5, 3, 1, 4))) == [[]]
        assert removed(scores, choose(scores, Budget(0.5, 4, 1, 4))) == [[1, 3, 5, 7]]
        assert removed(scores, choose(scores, Budget(0.75, 6, 1, 4))) == [[1, 3, 5, 7]]  # 5 and 6 are spared
        assert removed(scores, choose(scores, Budget(0.75, [6], 1, 3))) == [[0, 1, 3, 5, 7]]

    @pytest.mark.parametrize("asked", range(30))
    def test_a_width_that_is_no_multiple_stays_or_becomes_one(self, asked):
        (kept,) = choose([torch.rand(37)], Budget(asked / 37, asked, 8, 8))
        assert len(kept) == 37 if asked < 5 else len(kept) % 8 == 0
        assert 0 <= len(kept) - (37 - asked) < 8

    def test_stays_on_the_cpu_whatever_the_default_device(self):
        scores = draw(16)
        with torch.device("meta"):
            (kept,) = choose(scores, Budget(0.5, 8, 1, 4))
        assert kept.device.type == "cpu"


@st.composite
def pools(draw, round_to=None):
    """Groups of channels, with scores that often tie, and a number to remove that the floors allow."""
    numbers = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    scores = [
        torch.tensor(draw(st.lists(st.integers(0, 6), min_size=n, max_size=n)), dtype=torch.float32) for n in numbers
    ]
    floor = draw(st.integers(1, 8))
    remove = draw(st.integers(0, sum(max(n - floor, 0) for n in numbers)))
    return scores, Budget(0.5, remove, floor, draw(st.integers(1, 16)) if round_to is None else round_to)


QUICK = settings(max_examples=60, deadline=None)


class TestProperties:
    @QUICK
    @given(pools())
    def test_kept_is_sorted_unique_and_above_the_floor(self, pool):
        scores, budget = pool
        for score, kept in zip(scores, choose(scores, budget), strict=True):
            assert kept.dtype == torch.int64 and (kept.diff() > 0).all()
            assert kept[0] >= 0 and kept[-1] < len(score)
            assert len(kept) >= min(budget.floor, len(score))
            assert len(kept) == len(score) or len(kept) % budget.round_to == 0
            gone = torch.ones(len(score), dtype=torch.bool).index_fill(0, kept, False)
            assert not gone.any() or score[gone].max() <= score[kept].min()

    @QUICK
    @given(pools(round_to=1))
    def test_exactly_as_many_go_as_were_asked(self, pool):
        scores, budget = pool
        assert sum(map(len, scores)) - sum(map(len, choose(scores, budget))) == budget.remove

    @QUICK
    @given(pools())
    def test_more_removed_is_a_superset(self, pool):
        scores, budget = pool
        fewer = Budget(budget.sparsity, budget.remove // 2, budget.floor, budget.round_to)
        for less, more in zip(choose(scores, fewer), choose(scores, budget), strict=True):
            assert set(more.tolist()) <= set(less.tolist())

    @QUICK
    @given(pools(), st.randoms(use_true_random=False))
    def test_the_order_of_the_groups_is_of_no_account(self, pool, random):
        scores, budget = pool
        ranks = torch.cat(scores).argsort(stable=True).argsort().float()  # the same order, without ties
        scores = list(ranks.split([len(score) for score in scores]))
        order = list(range(len(scores)))
        random.shuffle(order)
        shuffled = choose([scores[i] for i in order], budget)
        straight = choose(scores, budget)
        assert all(torch.equal(straight[i], kept) for i, kept in zip(order, shuffled, strict=True))

    @QUICK
    @given(
        st.lists(st.integers(9, 64), min_size=1, max_size=5),
        st.floats(0.3, 0.7),
        st.sampled_from(["uniform", "global"]),
    )
    def test_more_sparsity_never_keeps_more(self, numbers, sparsity, allocation):
        scores, kept = draw(*numbers), []
        for fraction in (sparsity * 0.9, sparsity):
            try:
                plan = budgets(channels(*numbers), fraction, allocation, round_to=1)
            except InvalidConfig:
                return
            kept.append(choose(scores, plan["mlp_channel"]))
        for less, more in zip(*kept, strict=True):
            assert set(more.tolist()) <= set(less.tolist())


class TestRefusals:
    """CASES.md 4 and 5: never a silent no-op: what is said of it names what can be had."""

    def test_one_group_is_all_there_is(self):
        for allocation in ("uniform", "global", "gamma"):
            groups = kv_groups(1, 1, 1) + channels(64, 64, 64)
            assert why(groups, 0.5, allocation, gamma=3.36) == {"kv_group": "none of 1 can go", "mlp_channel": None}
            assert budgets(groups, 0.5, allocation, gamma=3.36)["mlp_channel"].sparsity == 0.5  # what is asked of all
            assert why(kv_groups(1, 1, 1), 0.5, allocation) == {"kv_group": "none of 1 can go"}

    def test_too_little_lists_what_is_reachable(self):
        few = why(kv_groups(2, 2), 0.2, "uniform")["kv_group"]
        assert few == "a sparsity of 0.2 removes none (reachable in a group of 2: 0.5)"
        assert why(kv_groups(4, 4), 0.1, "uniform")["kv_group"].endswith("(reachable in a group of 4: 0.25, 0.5, 0.75)")
        many = why(channels(64), 0.05, "uniform")["mlp_channel"]
        assert many.endswith(" 0.125, 0.25, 0.375, ..., 0.875)")

    def test_too_little_for_one_ranking(self):
        groups = kv_groups(4, 4) + channels(64, 64)
        assert why(groups, 0.05, "global")["kv_group"] == "a sparsity of 0.05 removes none (1 of 8 is 0.125)"

    def test_16_query_and_2_kv_heads_at_30_percent(self):
        assert budgets(kv_groups(2, 2), 0.3, "uniform")["kv_group"].remove == [1, 1]
        assert budgets(kv_groups(2, 2), 0.3, "global")["kv_group"].remove == 1

    def test_rounding_that_spares_everything(self):
        found = why(channels(48, 48), 0.2, "uniform", round_to=16)["mlp_channel"]
        assert found.startswith("a sparsity of 0.2 removes none (reachable in a group of 48: 0.333, ")
        found = why(channels(12), 0.3, "uniform", round_to=16)["mlp_channel"]
        assert found.endswith("(reachable in a group of 12: none)")
        found = why(channels(48, 48), 0.2, "global", round_to=48)["mlp_channel"]
        assert found.startswith("rounding every kept count up to a multiple of 48 spares what a sparsity of 0.2 ")

    def test_nothing_is_asked(self):
        assert why(kv_groups(1, 1), 0.0, "uniform") == {"kv_group": None}

    def test_too_much(self):
        message = r"^kv_group: 2 groups of 2 to 4 units, .* 5 of 6 .* \(0\.9\), at most 4 can\. Lower the sparsity"
        with pytest.raises(InvalidConfig, match=message):
            budgets(kv_groups(2, 4), 0.9, "global")
        message = r"^kv_group: .*: 6 of 6 would have to go \(1\), at most 4 can\. Lower the sparsity"
        with pytest.raises(InvalidConfig, match=message):  # the MLP loses all that it can, and that is not enough
            budgets(kv_groups(2, 4) + channels(16, 16), 0.95, "gamma", gamma=3.0)
        with pytest.raises(InvalidConfig, match=r"^mlp_channel: .* at most 16 can"):
            budgets(channels(16, 16), 0.9, "global")

    def test_too_much_even_after_the_clamp(self):
        with pytest.raises(InvalidConfig, match=r"^kv_group: .*at most 6 can"):
            budgets(kv_groups(4, 4) + channels(64, 64), 0.95, "gamma", gamma=3.0)
