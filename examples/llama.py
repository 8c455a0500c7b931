"""Prune a Llama by 20 %: plan, prune, evaluate, save.

The plan says what grouped-query attention allows before a weight is loaded or touched. Mistral and Gemma work alike.
"""

from optimum_prune import CalibrationConfig, Pruner, PruningConfig


def main(model, output, calibration, evaluation, **where):
    """Prune and save; every argument but `output` may be a Hub id or a local path.

    `where` says which part of the evaluation data is used: `split="test"`.
    """
    config = PruningConfig(
        scorer="ntk",
        sparsity=0.2,
        calibration=CalibrationConfig(calibration, num_samples=32, seq_len=128),
    )
    pruner = Pruner.from_pretrained(model)
    print(pruner.plan(config))
    print(pruner.prune(config))
    pruner.evaluate(evaluation, num_samples=32, seq_len=128, **where)
    print(pruner.comparison())
    pruner.save_pretrained(output)
    return pruner


if __name__ == "__main__":
    wikitext = "Salesforce/wikitext:wikitext-2-raw-v1"
    main("meta-llama/Llama-3.2-1B", "llama-ntk20", wikitext, wikitext, split="test")
