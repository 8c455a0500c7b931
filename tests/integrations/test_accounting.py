"""Every tensor of a source is read, or refused by name before pruning; the class is the one that the config names."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from optimum_prune import CheckpointError, InvalidConfig, Pruner, PruningConfig, RecoveryConfig, UnsupportedModel
from optimum_prune.integrations import accounting
from optimum_prune.integrations.loading import load_model, load_skeleton
from tests.integrations.hub_server import Fault, contents, loopback
from tests.models import gemma2, gemma3, inputs, llama, llava, opt, qwen2, t5

CUT = PruningConfig(scorer="magnitude", sparsity=0.3, allocation="global", round_to=1)
CLASSES = {
    "Qwen2ForSequenceClassification": lambda: qwen2(tie_word_embeddings=True),
    "Qwen2ForTokenClassification": qwen2,
    "LlamaForQuestionAnswering": llama,
    "LlamaModel": llama,
    "Gemma2ForTokenClassification": gemma2,
    "Gemma3TextForSequenceClassification": gemma3,
    "OPTForSequenceClassification": opt,
    "T5ForTokenClassification": t5,
    "T5ForSequenceClassification": t5,
    "T5EncoderModel": t5,
    "LlavaModel": llava,
}
"""Class -> what builds a language model of its config."""


def saved(model, folder, **extra):
    """Save a model, and add tensors to its only file."""
    model.save_pretrained(folder)
    save_file(load_file(folder / "model.safetensors") | extra, folder / "model.safetensors", {"format": "pt"})
    return folder


def edit(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refusals(folder, **options):
    """Return what loading and planning say."""
    messages = []
    for load in (load_model, load_skeleton):
        with pytest.raises(CheckpointError) as caught:
            load(folder, **options)
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("name", CLASSES)
def test_the_class_that_the_config_names(name, tmp_path):
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    dense = model_class(CLASSES[name]().config).eval()
    dense.save_pretrained(tmp_path / "dense")
    skeleton, pruner = load_skeleton(tmp_path / "dense"), Pruner.from_pretrained(tmp_path / "dense")
    assert type(skeleton) is type(pruner.model) is model_class
    assert skeleton.num_parameters() == pruner.model.num_parameters() == dense.num_parameters()
    assert pruner.prune(CUT).achieved > 0.1
    assert pruner.save_pretrained(tmp_path / "pruned") == "compact"
    again = Pruner.from_pretrained(tmp_path / "pruned").model
    assert type(again) is model_class
    given = inputs(llama()) if "T5" not in name else inputs(t5())
    if not again.config.is_encoder_decoder or name == "T5ForSequenceClassification":
        given = {"input_ids": given["input_ids"].clamp(min=3)}
        given["input_ids"][:, -1] = 2  # the only end of the sequence, at which T5 classifies
    with torch.no_grad():
        one, other = (model(**given).to_tuple()[0] for model in (pruner.model, again))
    assert torch.equal(one, other)


def test_a_class_without_a_head_predicts_no_tokens(tmp_path):
    transformers.LlamaForTokenClassification(llama().config).save_pretrained(tmp_path)
    pruner = Pruner.from_pretrained(tmp_path)
    with pytest.raises(InvalidConfig, match="Only language models can be evaluated, and LlamaForTokenCl"):
        pruner.evaluate([[1, 2, 3]])
    with pytest.raises(InvalidConfig, match="Only language models can be recovered, and LlamaForTokenCl"):
        pruner.recover(RecoveryConfig([[1, 2, 3]]))


@pytest.mark.parametrize("build", [llama, lambda: qwen2(tie_word_embeddings=True), opt, gemma3, t5, llava])
def test_tensors_that_nobody_reads(build, tmp_path):
    """A value head, as in a reward model, and a head that predicts further tokens."""
    extra = {"v_head.summary.weight": torch.ones(1, 32), "model.mtp.0.proj.weight": torch.ones(4, 4)}
    model = build()
    for message in refusals(saved(model, tmp_path, **extra)):
        assert "mtp.0.proj.weight, v_head.summary.weight, which " in message
        assert f"{type(model).__name__} does not read and a save would drop." in message


def test_many_tensors_are_counted(tmp_path):
    extra = {f"head.{i}.weight": torch.ones(2) for i in range(8)}
    for message in refusals(saved(llama(), tmp_path, **extra)):
        assert "head.4.weight and 3 more tensors, which" in message


def test_a_class_of_nobody(tmp_path):
    """Transformers has no such class, so the language model is loaded, and does not read all."""
    saved(llama(), tmp_path, **{"v_head.weight": torch.ones(1, 32)})
    edit(tmp_path, architectures=["LlamaForCausalLMWithValueHead"])
    for message in refusals(tmp_path):
        assert "(its config.json names LlamaForCausalLMWithValueHead)" in message
    saved(llama(), tmp_path)
    edit(tmp_path, architectures=["LLaMAForCausalLM"])
    assert type(load_model(tmp_path)) is transformers.LlamaForCausalLM


def test_tensors_that_are_missing(tmp_path):
    folder = saved(llama(), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for message in refusals(folder):
        assert "lacks model.layers.1.mlp.up_proj.weight, which LlamaForCausalLM needs" in message


def test_sizes_that_differ_are_never_made_up(tmp_path):
    folder = saved(llama(), tmp_path)
    edit(folder, intermediate_size=40)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight as \[32, 48\], but its config\.json says \[32, 40\]"):
        load_model(folder, ignore_mismatched_sizes=True)
    with pytest.raises(CheckpointError, match="The config and the weights do not belong together"):
        load_skeleton(folder)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.embeddings.position_ids"])
@pytest.mark.parametrize("build", [llama, gemma3, opt])
def test_computed_buffers_are_no_loss(build, name, tmp_path):
    folder = saved(build(), tmp_path, **{name: torch.ones(2)})
    assert load_model(folder).num_parameters() == load_skeleton(folder).num_parameters()


@pytest.mark.parametrize("build", [lambda: llama(tie_word_embeddings=True), opt, gemma2, t5])
def test_copies_of_tied_weights_are_no_loss(build, tmp_path):
    model = build()
    copies = {name: model.get_parameter(source).data.clone() for name, source in model.all_tied_weights_keys.items()}
    folder = saved(model, tmp_path, **copies)
    assert load_model(folder).num_parameters() == load_skeleton(folder).num_parameters() == model.num_parameters()


def test_shards_and_a_variant(tmp_path):
    model = llama()
    model.extra = torch.nn.Linear(3, 3)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    for message in refusals(tmp_path):
        assert "holds extra.bias, extra.weight, which" in message
    model.save_pretrained(tmp_path / "half", variant="fp16")
    for message in refusals(tmp_path / "half", variant="fp16"):
        assert "holds extra.bias, extra.weight, which" in message


def test_pickled_weights(tmp_path):
    model = llama()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict() | {"v_head.weight": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds v_head\.weight, which LlamaForCausalLM does not read"):
        load_model(tmp_path)


def test_a_compact_checkpoint(tmp_path):
    pruner = Pruner(llama())
    pruner.prune(CUT)
    pruner.save_pretrained(tmp_path)
    save_file(
        load_file(tmp_path / "model.safetensors") | {"v_head.weight": torch.ones(2)}, tmp_path / "model.safetensors"
    )
    for message in refusals(tmp_path):
        assert "holds v_head.weight, which LlamaForCausalLM does not read" in message


def test_a_hub_repository_is_refused_by_its_headers(tmp_path, monkeypatch):
    saved(llama(), tmp_path / "it", **{"v_head.weight": torch.ones(2)})
    with loopback(tmp_path, monkeypatch) as hub:
        hub.create("me/it", contents(tmp_path / "it"))
        with pytest.raises(CheckpointError, match=r"me/it holds v_head\.weight, which LlamaForCausalLM does not read"):
            load_skeleton("me/it")
        hub.faults.append(Fault("model.safetensors", 500))
        assert load_skeleton("me/it").num_parameters() == llama().num_parameters()  # what is loaded is compared later


def gguf_file(folder, names):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(folder / "it.gguf", "llama")
    for name in names:
        writer.add_tensor(name, torch.ones(2, 2).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "it.gguf"


def test_gguf(tmp_path):
    """Transformers leaves out what it does not know, and says nothing."""
    known = ["token_embd.weight", "output_norm.weight", "output.weight", "blk.2.ffn_up.weight", "rope_freqs.weight"]
    accounting.check_gguf("it", llama(), gguf_file(tmp_path, known))
    file = gguf_file(tmp_path, [*known, "cls.output.weight", "blk.3.ffn_up.weight", "blk.0.attn_sinks.weight"])
    with pytest.raises(
        CheckpointError, match=r"holds blk\.0\.attn_sinks\.weight, blk\.3\.ffn_up\.weight, cls\.output\.weight, which"
    ):
        accounting.check_gguf("it", llama(), file)


@pytest.mark.parametrize(
    ("block", "method"),
    [({"quant_method": name}, name) for name in ("gptq", "awq", "bitsandbytes", "compressed-tensors", "fp8", "new")]
    + [({"load_in_4bit": True}, "by an unnamed method")],
)
def test_quantised_checkpoints_are_refused_by_their_config(block, method, tmp_path):
    """Before weights, of which there are none here, and before packages, which are not installed."""
    llama().config.save_pretrained(tmp_path)
    edit(tmp_path, quantization_config=block)
    for load in (Pruner.from_pretrained, load_skeleton):
        with pytest.raises(UnsupportedModel, match=rf"is quantised \({method}\)\. Prune the plain model"):
            load(tmp_path)


def test_a_revision_of_code_that_is_not_there(dense):
    assert type(load_model(dense, trust_remote_code=True, code_revision="main")) is transformers.LlamaForCausalLM


def test_quantising_while_loading_is_refused(dense):
    with pytest.raises(UnsupportedModel, match="quantization_config=BitsAndBytesConfig would quantise"):
        Pruner.from_pretrained(dense, quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True))
    with pytest.raises(UnsupportedModel, match="quantization_config=dict would quantise"):
        Pruner.from_pretrained(dense, quantization_config={"quant_method": "gptq", "bits": 4})
