"""Prune a Qwen2 to equal sizes in every layer, which plain transformers loads without this package."""

from optimum_prune import CalibrationConfig, Pruner, PruningConfig


def main(model, output, calibration, evaluation, **where):
    """Prune and save; every argument but `output` may be a Hub id or a local path.

    `where` says which part of the evaluation data is used: `split="test"`.
    """
    config = PruningConfig(
        scorer="ntk",
        sparsity=0.25,
        allocation="uniform",
        calibration=CalibrationConfig(calibration, num_samples=32, seq_len=128),
    )
    pruner = Pruner.from_pretrained(model)
    print(pruner.prune(config))
    pruner.evaluate(evaluation, num_samples=32, seq_len=128, **where)
    print(pruner.comparison())
    pruner.save_pretrained(output, layout="stock")  # refused where a class could not load it
    return pruner


if __name__ == "__main__":
    wikitext = "Salesforce/wikitext:wikitext-2-raw-v1"
    main("Qwen/Qwen2.5-0.5B", "qwen2-ntk25", wikitext, wikitext, split="test")
