"""The keys that `chat_template_kwargs` of a request may not set: arguments of the tokenizer instead of variables of the
chat template. `apply_chat_template` takes both in the same call.

`padding` and `max_length` would make a prompt of any length before its tokens are counted. `truncation` would change
the tokenizer that all requests share.
"""

import inspect
from collections.abc import Mapping
from typing import Any

RESERVED_SETTINGS = frozenset(
    {
        # apply_chat_template
        *("conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        "tokenizer_kwargs",
        # the call of a tokenizer
        *("text", "text_pair", "text_target", "text_pair_target", "add_special_tokens", "stride", "verbose"),
        *("is_split_into_words", "split_special_tokens", "pad_to_multiple_of", "padding_side", "return_length"),
        *("return_token_type_ids", "return_attention_mask", "return_overflowing_tokens", "return_offsets_mapping"),
        "return_special_tokens_mask",
        # Special tokens, which a template may write once per message: a long one would make a prompt of any length.
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
        "additional_special_tokens",
    }
)
"""The keys that no backend's tokenizer may get from a request."""
# An argument that is a variable of templates too.
_TEMPLATE_VARIABLES = frozenset({"documents"})


def reserved_settings(tokenizer: Any) -> frozenset[str]:
    """RESERVED_SETTINGS, and the arguments and special tokens that this tokenizer has besides."""
    parameters = (
        parameter
        for function in (tokenizer.apply_chat_template, tokenizer.__call__)
        for parameter in inspect.signature(function).parameters.values()
    )
    named = {each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    return RESERVED_SETTINGS | (named - _TEMPLATE_VARIABLES) | frozenset(tokenizer.special_tokens_map)


def reserved_message(settings: Mapping[str, Any] | None, reserved: frozenset[str] = RESERVED_SETTINGS) -> str | None:
    """The error for the first reserved key in `chat_template_kwargs`, None if there is none.

    >>> reserved_message({"enable_thinking": False}) is None
    True
    """
    key = next((name for name in settings or {} if name in reserved), None)
    if key is None:
        return None
    return (
        f"chat_template_kwargs must not set {key}: it is an argument of the tokenizer, not a variable of the chat "
        "template. Leave it out."
    )
