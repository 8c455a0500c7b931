"""Prune the MLPs of an OPT alone, so that plain transformers loads the result.

OPT's class derives the size of heads from their number: with fewer heads, its checkpoint needs this package.
"""

from optimum_prune import CalibrationConfig, Pruner, PruningConfig


def main(model, output, calibration, evaluation, **where):
    """Prune and save; every argument but `output` may be a Hub id or a local path.

    `where` says which part of the evaluation data is used: `split="test"`.
    """
    config = PruningConfig(
        scorer="ntk",
        sparsity=0.25,
        units=["mlp_channel"],
        allocation="uniform",
        calibration=CalibrationConfig(calibration, num_samples=32, seq_len=128),
    )
    pruner = Pruner.from_pretrained(model)
    print(pruner.prune(config))
    pruner.evaluate(evaluation, num_samples=32, seq_len=128, **where)
    print(pruner.comparison())
    pruner.save_pretrained(output, layout="stock")
    return pruner


if __name__ == "__main__":
    wikitext = "Salesforce/wikitext:wikitext-2-raw-v1"
    main("facebook/opt-125m", "opt-mlp25", wikitext, wikitext, split="test")
