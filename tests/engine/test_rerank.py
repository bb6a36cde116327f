"""Reranking against Hugging Face, windows, and engines that hold only the first layers."""

import json
from functools import lru_cache

import pytest
import torch

import vllm_hook
from conftest import TINY_ENGINE, hook_llm, stop_engine
from passages import PASSAGES, QUERIES
from prompts import greedy
from tiny import SENTENCES
from vllm_hook import rerank as reranking
from vllm_hook.errors import CapacityError, ProgramError, SiteError, SpanError, UnsupportedError

pytestmark = pytest.mark.engine

#: [layer, head] of SmolLM2, all below layer 15.
HEADS = [(3, 1), (8, 0), (8, 5), (10, 2), (11, 7), (12, 4), (13, 8), (14, 3)]


class HuggingFace:
    """The published computation, on its own: prompt, places by decoding, eager attention, plain loops."""

    def __init__(self, folder):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(str(folder))
        self.model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def prompt(self, query, documents):
        body = " Here are some paragraphs:\n\n"
        for i, text in enumerate(documents):
            body += f"[document {i + 1}] {text}\n\n"
        asked = "Please find information that are relevant to the following query in the paragraphs above."
        body += f"{asked}\n\nQuery: {query}"
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": body}], tokenize=False, add_generation_prompt=True
        )
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)

        def tokens(piece, start=0):
            a = text.index(piece, start)
            b = a + len(piece)
            return [i for i, (x, y) in enumerate(encoded["offset_mapping"]) if x < b and y > a]

        rows = tokens(f"{asked}\n\nQuery: {query}")
        return encoded["input_ids"], [tokens(d) for d in documents], rows

    @lru_cache(maxsize=2)  # noqa: B019
    def attention(self, query, documents):
        """Of every head, the mean over the rows of the query."""
        ids, places, rows = self.prompt(query, documents)
        with torch.no_grad():
            layers = self.model(torch.tensor([ids]), output_attentions=True).attentions
        return [layer[0][:, rows].double().mean(1) for layer in layers], places

    def scores(self, query, documents, heads):
        layers, places = self.attention(query, tuple(documents))
        empty, _ = self.attention("N/A", tuple(documents))
        heads = heads or [(y, h) for y, layer in enumerate(layers) for h in range(len(layer))]
        tok = sum(layers[y][h] for y, h in heads)
        nothing = sum(empty[y][h] for y, h in heads)
        scores = []
        for place in places:
            c = [float(tok[i] - nothing[i]) for i in place]
            mean = sum(c) / len(c)
            std = (sum((x - mean) ** 2 for x in c) / (len(c) - 1)) ** 0.5
            scores.append(sum(x for x in c if x > mean - 2 * std))
        return scores


def by_index(hits):
    return [hit.score for hit in sorted(hits, key=lambda hit: hit.index)]


def agree(hits, want, rel=1e-3):
    """Every score, and the order. (The size of scores is that of the largest: small ones are differences.)"""
    size = max(abs(w) for w in want)
    worst = max(abs(a - b) for a, b in zip(by_index(hits), want, strict=True)) / size
    assert worst <= rel
    assert [hit.index for hit in hits] == sorted(range(len(want)), key=lambda i: -want[i])
    return worst


# -- the real model -----------------------------------------------------------------------------


@pytest.mark.model
def test_smollm2_scores_are_those_of_hugging_face(smollm2_path):
    reference = HuggingFace(smollm2_path)
    whole = {**TINY_ENGINE, "max_model_len": 2048, "max_num_batched_tokens": 2048}
    llm = reranking.engine(
        str(smollm2_path), HEADS, whole=True, **whole, arm={"attention": {"layers": "all", "rows": "all"}}
    )
    try:
        chosen, everything = {}, {}
        for query in QUERIES[:3]:
            chosen[query] = vllm_hook.rerank(llm, query, PASSAGES, heads=HEADS)
            worst = agree(chosen[query], reference.scores(query, PASSAGES, HEADS))
            everything[query] = vllm_hook.rerank(llm, query, PASSAGES)
            all_worst = agree(everything[query], reference.scores(query, PASSAGES, None))
            print(f"{query}: {worst:.1e} chosen, {all_worst:.1e} all heads")
        # Attention has to say something here at all: the right passage comes first.
        assert [everything[q][0].index for q in QUERIES[:3]] == [0, 1, 2]
        many = reranking.rerank_many(llm, [(q, PASSAGES) for q in QUERIES[:3]], HEADS, top_k=2)
        for query, hits in zip(QUERIES, many, strict=False):
            assert [h.index for h in hits] == [h.index for h in chosen[query]][:2]
    finally:
        stop_engine(llm)
    short = reranking.engine(str(smollm2_path), HEADS, **whole)  # layers 0 to 14
    try:
        for query, full in chosen.items():
            got = vllm_hook.rerank(short, query, PASSAGES, heads=HEADS)
            assert by_index(got) == pytest.approx(by_index(full), rel=1e-4, abs=1e-6)
    finally:
        stop_engine(short)


# -- tiny ---------------------------------------------------------------------------------------

TINY_HEADS = [(0, 3), (1, 0), (1, 2)]
DOCUMENTS = [s.lower() for s in SENTENCES]
QUERY = "the train to the coast"


@pytest.fixture(scope="module")
def tiny_full(tiny_dir):
    with hook_llm(
        tiny_dir("llama"), programs=[reranking.program(TINY_HEADS)], enable_prefix_caching=True
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def tiny_short(tiny_dir):
    with hook_llm(
        tiny_dir("llama"),
        programs=[reranking.program(TINY_HEADS)],
        enable_prefix_caching=True,
        layers_up_to=2,
    ) as llm:
        yield llm


def test_chosen_heads_of_a_shortened_model_score_the_same(tiny_dir, tiny_full, tiny_short):
    documents = DOCUMENTS[:5]
    full = vllm_hook.rerank(tiny_full, QUERY, documents, TINY_HEADS)
    short = vllm_hook.rerank(tiny_short, QUERY, documents, TINY_HEADS)
    assert by_index(short) == pytest.approx(by_index(full), rel=1e-5, abs=1e-7)
    agree(full, HuggingFace(tiny_dir("llama")).scores(QUERY, documents, TINY_HEADS))
    kept = tiny_short.llm_engine.vllm_config.model_config.get_total_num_hidden_layers()
    assert (kept, tiny_short.sites()["model"].layers) == (2, 2)


def test_calibration_reads_the_documents_from_the_cache(tiny_full):
    """The second prompt of a pair runs only its last pages."""
    documents = ["one two three four. " * 8, "five six seven. " * 8]
    query, nothing = (reranking.make_prompt(tiny_full.get_tokenizer(), q, documents) for q in (QUERY, "N/A"))
    name = reranking.program(TINY_HEADS)["name"]
    tiny_full.reset_prefix_cache()
    outs = tiny_full.generate(
        [{"prompt_token_ids": p.ids} for p in (query, nothing)],
        greedy(1),
        hook=[{"use": [name], "spans": {"query": list(p.query)}} for p in (query, nothing)],
        use_tqdm=False,
    )
    first, second = (out.num_cached_tokens for out in outs)
    assert first == 0
    assert nothing.query[0] - 32 < second <= nothing.query[0]  # pages of 32, up to the first row needed


def test_windows_hold_what_fits_and_keep_the_indexes(tiny_full):
    documents = [f"{s} {s}" for s in DOCUMENTS] * 2
    hits = vllm_hook.rerank(tiny_full, QUERY, documents, TINY_HEADS)
    assert sorted(h.index for h in hits) == list(range(14))
    assert [documents[h.index] for h in hits] == [h.text for h in hits]
    windows = {h.window for h in hits}
    assert windows == set(range(len(windows)))
    assert len(windows) > 1
    alone = [i for i in range(14) if next(h.window for h in hits if h.index == i) == 0]
    again = vllm_hook.rerank(tiny_full, QUERY, [documents[i] for i in alone], TINY_HEADS)
    assert by_index(again) == pytest.approx(by_index([h for h in hits if h.window == 0]), rel=1e-4, abs=1e-6)
    with pytest.raises(CapacityError, match=r"document 1 takes \d+ tokens"):
        vllm_hook.rerank(tiny_full, QUERY, ["short", "word " * 600], TINY_HEADS)


def test_no_documents_and_no_calibration(tiny_full):
    assert vllm_hook.rerank(tiny_full, QUERY, [], TINY_HEADS) == []
    plain = vllm_hook.rerank(tiny_full, QUERY, DOCUMENTS[:2], TINY_HEADS, calibrate=False)
    assert min(by_index(plain)) > 0  # sums of probabilities
    assert by_index(plain) != by_index(vllm_hook.rerank(tiny_full, QUERY, DOCUMENTS[:2], TINY_HEADS))


def test_a_program_ranks_by_itself(tiny_full):
    """By words in a chat, by spans with token ids, by a server's JSON; and from two results, calibrated."""
    from vllm_hook.analyzers import CoreReranker
    from vllm_hook.build.rerank_heads import rerank_program_parts
    from vllm_hook.rerank_prompt import NOTHING, RANKING, make_content, make_prompt

    documents = DOCUMENTS[:3]
    tiny_full.load_program({"schema": 1, "name": "ranks", **rerank_program_parts(TINY_HEADS)})
    chats = [[{"role": "user", "content": make_content(q, documents)[0]}] for q in (QUERY, NOTHING)]
    by_words, nothing = tiny_full.chat(chats, greedy(1), hook="ranks", use_tqdm=False)
    prompt = make_prompt(tiny_full.get_tokenizer(), QUERY, documents)
    hook = {"use": ["ranks"], "spans": prompt.spans()}
    ids = {"prompt_token_ids": prompt.ids}
    (by_spans,) = tiny_full.generate(ids, greedy(1), hook=hook, use_tqdm=False)
    (served,) = tiny_full.llm.generate(ids, greedy(1, extra_args={"hook": json.dumps(hook)}), use_tqdm=False)
    plain = vllm_hook.rerank(tiny_full, QUERY, documents, TINY_HEADS, calibrate=False)
    for out in (by_words, by_spans, served):
        assert out.hook.errors == {}
        details = out.hook.scores["ranking"].details
        assert details["scores"] == pytest.approx(by_index(plain), abs=1e-6)
        assert details["order"] == [hit.index for hit in plain]
        assert not details["calibrated"]
    spans = {name.rpartition("/")[2]: ranges for name, ranges in by_words.hook.spans.items()}
    seen = {name: o.hook.observed["attention"] for name, o in (("query", by_words), ("N/A", nothing))}
    both = CoreReranker().score(seen, spans, CoreReranker.Options(**RANKING))
    whole = vllm_hook.rerank(tiny_full, QUERY, documents, TINY_HEADS)
    assert both.details["scores"] == pytest.approx(by_index(whole), abs=1e-6)
    with pytest.raises(SpanError, match=r"program 'ranks', spans.*no text"):
        tiny_full.chat([{"role": "user", "content": QUERY}], greedy(1), hook="ranks", use_tqdm=False)


def test_heads_that_are_not_armed_are_named(tiny_full):
    with pytest.raises(SiteError, match=r"not armed.*rerank\.engine"):
        vllm_hook.rerank(tiny_full, QUERY, DOCUMENTS[:2], [(3, 0)])


# -- shortened engines --------------------------------------------------------------------------


def test_a_shortened_engine_does_not_generate(tiny_short):
    for params in (greedy(2), greedy(1, logprobs=1), greedy(1, prompt_logprobs=1)):
        with pytest.raises(UnsupportedError, match="only the first 2 layers"):
            tiny_short.generate("the train", params, hook=False, use_tqdm=False)
        with pytest.raises(UnsupportedError, match="only the first 2 layers"):
            tiny_short.llm.generate("the train", params, use_tqdm=False)  # not past HookLLM either
    assert len(tiny_short.generate("the train", greedy(1), hook=False, use_tqdm=False)) == 1


def test_other_engines_of_the_process_keep_all_layers(tiny_dir, tiny_short, tiny_full):
    del tiny_short  # made before
    with hook_llm(tiny_dir("llama"), programs=[reranking.program([(3, 1)])]) as llm:
        assert llm.sites()["model"].layers == 4
        a, b = (e.generate("the train to", greedy(4), hook=False, use_tqdm=False) for e in (llm, tiny_full))
    assert a[0].outputs[0].token_ids == b[0].outputs[0].token_ids


def test_layers_that_the_model_does_not_have(tiny_dir):
    with (
        pytest.raises(UnsupportedError, match="layers_up_to=9, but the model has 4 layers"),
        hook_llm(tiny_dir("llama"), layers_up_to=9),
    ):
        pass
    with (
        pytest.raises(ProgramError, match="layers_up_to"),
        hook_llm(tiny_dir("llama"), layers_up_to=0),
    ):
        pass
    with (
        pytest.raises(ProgramError, match="layer 2 does not exist: the model has 2 layers"),
        hook_llm(tiny_dir("llama"), programs=[reranking.program([(2, 0)])], layers_up_to=2),
    ):
        pass
