"""A tokenizer whose tokens are so many characters each, and chat templates as models have them."""

import jinja2

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"
TRIMS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}<a>"


class CharTokenizer:
    """Tokens of ``width`` characters; those of one character have its number."""

    is_fast = True

    def __init__(self, template=PLAIN, width=1):
        self.chat_template, self.width = template, width

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        return jinja2.Template(self.chat_template, keep_trailing_newline=True).render(messages=messages)

    def __call__(self, text, add_special_tokens, return_offsets_mapping=False):
        starts = range(0, len(text), self.width)
        ids = [ord(c) for c in text] if self.width == 1 else list(range(len(starts)))
        return {"input_ids": ids, "offset_mapping": [(i, min(i + self.width, len(text))) for i in starts]}
