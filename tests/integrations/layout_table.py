"""What works with a checkpoint of which layout: `python tests/integrations/layout_table.py > model_cards/LAYOUTS.md`.

Every cell is run: a small random model of the architecture is cut, saved in the layout, and used. "yes" means that it
computes what the pruned model computes (logits within 1e-5, the same tokens), or trains; "no" names the error.
"""
# pyright: reportArgumentType=false

import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tests are not installed

import peft
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import PrinterCallback, Trainer, TrainingArguments, pipeline

from optimum_prune.binding import bind
from optimum_prune.integrations.layouts import save_checkpoint
from tests.calibration.conftest import build_processor
from tests.models import IMAGE_TOKEN, VARIANTS, inputs, llama
from tests.outputs import load
from tests.processes import answer
from tests.pruned import unevenly, uniformly
from tests.words import tokenizer

ARCHITECTURES: Mapping[str, Callable[[], Any]] = {
    "Llama": llama,
    "Llama, tied": partial(llama, tie_word_embeddings=True),
    "Mistral": VARIANTS["mistral"],
    "Qwen2": VARIANTS["qwen2"],
    "Qwen3": VARIANTS["qwen3"],
    "Gemma 2": VARIANTS["gemma2"],
    "Gemma 3 (text)": VARIANTS["gemma3"],
    "OPT": VARIANTS["opt"],
    "T5": VARIANTS["t5"],
    "T5, gated": VARIANTS["t5-gated"],
    "LLaVA": VARIANTS["llava"],
}
LAYOUTS = {"stock": uniformly, "compact": unevenly, "padded": unevenly}
PLAIN = """
import json, sys
from pathlib import Path
from safetensors.torch import save_file
from tests.models import inputs
from tests.outputs import load

errors = {}
for folder in map(Path, sys.argv[1:]):
    try:
        model, complaints = load(folder)
        assert not complaints, complaints
        save_file({"logits": model(**inputs(model)).logits.detach()}, folder / "plain.logits")
    except Exception as error:
        errors[str(folder)] = [type(error).__name__, str(error)]
assert "optimum_prune" not in sys.modules
print(json.dumps(errors))
"""
GENERATION = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}


class NotThere(Exception):
    """What transformers itself does not have for the architecture."""


def table(names: Iterable[str]) -> dict[tuple[str, str], dict[str, str]]:
    """Run all cells of some architectures: (architecture, layout) -> {column: cell}."""
    with tempfile.TemporaryDirectory() as directory:
        folders = {}
        for name in names:
            for layout, cut in LAYOUTS.items():
                folders[name, layout] = Path(directory) / f"{len(folders)}"
                _save(cut(ARCHITECTURES[name]()), folders[name, layout], layout)
        plain = answer(PLAIN, *folders.values())
        return {row: _cells(folder, plain.get(str(folder))) for row, folder in folders.items()}


def markdown(rows: Mapping[tuple[str, str], Mapping[str, str]]) -> list[str]:
    """Lay out the rows, with a heading."""
    columns = list(next(iter(rows.values())))
    lines = [["architecture", "layout", *columns], ["---"] * (2 + len(columns))]
    lines += [[*row, *cells.values()] for row, cells in rows.items()]
    return [f"| {' | '.join(line)} |" for line in lines]


def _save(model: Any, folder: Path, layout: str) -> None:
    if hasattr(model.config, "vision_config"):  # it could not read image tokens in its own text
        model.generation_config.suppress_tokens = [IMAGE_TOKEN]
    expected = model(**inputs(model)).logits.detach()
    assert save_checkpoint(model, folder, layout=layout) == layout
    save_file({"logits": expected}, folder / "expected.logits")
    (build_processor() if hasattr(model.config, "vision_config") else tokenizer()).save_pretrained(folder)


def _cells(folder: Path, plain: list[str] | None) -> dict[str, str]:
    first = f"no: {plain[0]}" if plain else _cell(lambda folder: _same(folder, _read(folder, "plain")), folder)
    return {"plain transformers": first} | {name: _cell(check, folder) for name, check in CHECKS.items()}


def _cell(check: Callable[[Path], None], folder: Path) -> str:
    torch.manual_seed(0)
    try:
        check(folder)
    except NotThere:
        return "not in transformers"
    except Exception as error:
        print(f"{folder}: {error!r}", file=sys.stderr)
        return f"no: {type(error).__name__}"
    return "yes"


def _read(folder: Path, name: str) -> Any:
    return load_file(folder / f"{name}.logits")["logits"]


def _same(folder: Path, logits: Any) -> None:
    difference = (logits - _read(folder, "expected")).abs().max()
    assert difference < 1e-5, difference


def _plugin(folder: Path) -> None:
    model, complaints = load(folder)
    assert not complaints
    _same(folder, model(**inputs(model)).logits)


def _example(model: Any) -> dict[str, Any]:
    given = inputs(model)
    return given | {"labels": given.pop("decoder_input_ids", given["input_ids"])}


def _lora(folder: Path) -> None:
    base = load(folder)[0]
    targets = [name for group in bind(base) if group.declared.default for name in group.linear_names]
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=targets)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(**_example(model)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = [bool(weight.any()) for name, weight in model.named_parameters() if "lora_B" in name]
    assert len(moved) == len(targets) and all(moved)
    model.save_pretrained(folder / "adapter")
    again = peft.PeftModel.from_pretrained(load(folder)[0], folder / "adapter")
    given = inputs(base)
    assert torch.equal(again.eval()(**given).logits, model.eval()(**given).logits)


def _trainer(folder: Path) -> None:
    model = load(folder)[0]
    batch = _example(model)
    rows = [{name: tensor[i] for name, tensor in batch.items()} for i in range(len(batch["input_ids"]))]
    before = model(**inputs(model)).logits.detach()
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=2,
        learning_rate=0.01,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model()
    trained = model.eval()(**inputs(model)).logits
    assert not torch.equal(trained, before)
    again = load(folder / "trainer")[0]
    assert (again(**inputs(again)).logits - trained).abs().max() < 1e-5  # T5's last bits depend on the processor


def _pipeline(folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    if config.is_encoder_decoder:
        raise NotThere("transformers 5 has no pipeline from text to text")
    if hasattr(config, "vision_config"):
        call = pipeline("image-text-to-text", model=str(folder), processor=build_processor())
        shown = call(images=Image.new("RGB", (20, 30)), text="w5 <image> w6", generate_kwargs=GENERATION)
    else:
        call = pipeline("text-generation", model=str(folder), tokenizer=tokenizer())
        shown = call("w5 w6 w7", **GENERATION)
    assert len(shown[0]["generated_text"]) > len("w5 w6 w7")


def _compiled(folder: Path) -> None:
    torch.compiler.reset()
    model = load(folder)[0]
    with torch.no_grad():
        _same(folder, torch.compile(model, backend="eager")(**inputs(model)).logits)


def _static(folder: Path) -> None:
    model = load(folder)[0]
    given = {name: tensor for name, tensor in inputs(model).items() if not name.startswith("decoder")}
    dynamic, static = (
        model.generate(**given, **GENERATION, **cache) for cache in ({}, {"cache_implementation": "static"})
    )
    assert torch.equal(dynamic, static)


def _batched(folder: Path) -> None:
    model = load(folder)[0]
    if model.config.is_encoder_decoder or model.config.model_type == "opt":
        raise NotThere("the dense model has no continuous batching either")
    ids = [5, 6, 7, 8]
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    alone = model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()
    small = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    options |= {"suppress_tokens": model.generation_config.suppress_tokens}
    config = transformers.GenerationConfig(**options)
    (found,) = model.generate_batch([ids], generation_config=config, continuous_batching_config=small).values()
    assert found.generated_tokens == alone


CHECKS: Mapping[str, Callable[[Path], None]] = {
    "with `import optimum_prune`": _plugin,
    "PEFT LoRA": _lora,
    "Trainer": _trainer,
    "pipeline": _pipeline,
    "torch.compile": _compiled,
    "static cache": _static,
    "continuous batching": _batched,
}
VERSIONS = ", ".join(
    f"{library.__name__} {library.__version__.partition('+')[0]}" for library in (transformers, torch, peft)
)
HEADING = f"""# What works with which layout

Generated by `python tests/integrations/layout_table.py` from small random models, every cell by running it:
{VERSIONS}, on a CPU. Do not edit.

- `stock`: all layers of one size, half of the heads where the class takes that; `compact` and `padded`: three layers of
  three sizes.
- yes: the logits are those of the pruned model within 1e-5 and the generated tokens the same; or training for 2 steps
  moves the weights, and what it saves loads again with logits within 1e-5.
- The first column is a process in which this package is not imported; all others are with `import optimum_prune`.
- pipeline: `text-generation`, of LLaVA `image-text-to-text`. torch.compile: backend `eager`.
- continuous batching: `generate_batch`. It has one number of KV heads for all layers, and is refused where layers
  differ in them; `compact` layers that differ in their MLP channels alone are served.
"""

if __name__ == "__main__":
    print(HEADING)
    print("\n".join(markdown(table(ARCHITECTURES))))
