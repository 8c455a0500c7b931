"""Drop the blocks of a Qwen3 that change the hidden states least: fewer layers are faster everywhere."""

from optimum_prune import CalibrationConfig, Pruner, PruningConfig


def main(model, output, calibration, evaluation, **where):
    """Prune and save; every argument but `output` may be a Hub id or a local path.

    `where` says which part of the evaluation data is used: `split="test"`.
    """
    config = PruningConfig(
        pattern="layers",
        sparsity=0.2,
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
    main("Qwen/Qwen3-0.6B", "qwen3-layers20", wikitext, wikitext, split="test")
