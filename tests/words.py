"""A tokenizer of the vocabulary that the small models have, built without a download."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def tokenizer(vocabulary: int = 96) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words `w3`, `w4`, ...; padding, start and end are 0, 1 and 2."""
    special = ["<pad>", "<s>", "</s>"]
    words = special + [f"w{i}" for i in range(3, vocabulary)]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )
