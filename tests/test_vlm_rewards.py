"""Rewards that ask a vision-language model: a real server, with replies replaced where their content matters."""

import math

import numpy as np
import torch
from vlm_server import garbage, status

from ddpo_pytorch import rewards

FAST = {"backoff": 0.05, "max_tries": 2, "max_tokens": 8, "concurrency": 1}
ONE_PIXEL = torch.linspace(0, 1, 3 * 3 * 16 * 16).view(3, 3, 16, 16)


def saying(proxy, *replies):
    """Replies to the questions from now on, in order; the first reply is for the probe at the start."""
    left = ["probe", *replies]
    proxy.edit = lambda reply: reply["choices"][0]["message"].update(content=left.pop(0))


def test_strict_satisfaction_is_the_share_of_answers_found(proxy):
    saying(proxy, "There are TWO of them.", "An elephant.", "three", "", "ant?", "many, many")
    reward = rewards.llava_strict_satisfaction(base_url=proxy.base_url, **FAST)
    questions = ["How many?", "Which animal?"]
    metadata = [{"questions": questions, "answers": [n, "ant"]} for n in ("two", "three")]
    metadata.append({"questions": questions[1:], "answers": ["ant"]})
    scores, info = reward(ONE_PIXEL, ["p"] * 3, metadata)
    # "ant" is not in "elephant", and not in a missing reply.
    np.testing.assert_array_equal(scores, [0.5, 0.5, 1])
    assert info["reply"] == ["There are TWO of them. / An elephant.", "three / ", "ant?"]
    asked = [q["messages"][0]["content"][1]["text"] for q in proxy.questions[1:]]
    assert asked == [*questions, *questions, questions[1]]


def test_a_question_without_any_reply_fails_its_sample_alone(proxy):
    saying(proxy, "two", "ant", "two")
    reward = rewards.llava_strict_satisfaction(base_url=proxy.base_url, **FAST)
    metadata = [{"questions": ["How many?", "Which?"], "answers": ["two", "ant"]}] * 2
    proxy.faults = [None, None, None, status(400)]
    scores, info = reward(ONE_PIXEL[:2], ["p"] * 2, metadata)
    np.testing.assert_array_equal(scores, [1, np.nan])
    assert info["failures"][0] is None and "HTTP 400" in info["failures"][1]


def test_a_prompt_without_questions_fails_its_sample_alone(proxy):
    saying(proxy, "two")
    reward = rewards.llava_strict_satisfaction(base_url=proxy.base_url, **FAST)
    metadata = [{}, {"questions": ["How many?"], "answers": ["two"]}, None]
    scores, info = reward(ONE_PIXEL, ["p"] * 3, metadata)
    np.testing.assert_array_equal(scores, [np.nan, 1, np.nan])
    assert 'as many "questions" as "answers"' in info["failures"][0] and info["failures"][1] is None


def test_bertscore_recalls_the_prompt_from_the_description(proxy, minilm):
    saying(proxy, "a cat riding a bicycle down the street", "a dog sleeping on a sofa", "")
    reward = rewards.llava_bertscore(
        base_url=proxy.base_url, bert_model=str(minilm), num_layers=6, device="cpu", question="Say?", **FAST
    )
    scores, info = reward(ONE_PIXEL, ["a cat riding a bike"] * 3, [{}] * 3)
    np.testing.assert_allclose(scores, [0.74108, 0.25633, 0], atol=1e-5)
    assert info["reply"][1] == "a dog sleeping on a sofa" and info["failures"] == [None] * 3
    assert proxy.questions[-1]["messages"][0]["content"][1]["text"] == "Say?"
    proxy.faults = [garbage(b"{}")]
    scores, info = reward(ONE_PIXEL[:1], ["a cat"], [{}])
    assert np.isnan(scores[0]) and "unreadable reply" in info["failures"][0]


def test_yes_probability_is_read_from_log_probabilities(proxy):
    left = [{"yes": 0.5}, {"Yes": 0.3, "No": 0.1}, {"maybe": 0.9}]

    def edit(reply):
        top = [{"token": t, "logprob": math.log(p), "bytes": None} for t, p in left.pop(0).items()]
        reply["choices"][0]["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}

    proxy.edit = edit
    options = {**FAST, "max_tokens": 1}
    reward = rewards.vlm_yes_probability(base_url=proxy.base_url, question="Is it {prompt}? {0}{x}", **options)
    scores, info = reward(ONE_PIXEL[:2], ["a cat", "a dog"], [{}] * 2)
    np.testing.assert_allclose(scores, [0.75, np.nan])
    assert "neither yes nor no" in info["failures"][1]
    assert proxy.questions[-1]["messages"][0]["content"][1]["text"] == "Is it a dog? {0}{x}"


def test_ratings_are_read_from_the_replies(proxy):
    saying(proxy, "I'd say 7.5.", "100", "no idea")
    reward = rewards.vlm_rating(base_url=proxy.base_url, **FAST)
    scores, info = reward(ONE_PIXEL, ["a cat"] * 3, [{}] * 3)
    np.testing.assert_array_equal(scores, [7.5, np.nan, np.nan])
    assert info["failures"][0] is None and 'no number from 0 to 10: "100"' in info["failures"][1]


def test_rewards_are_deterministic_on_the_real_server(llava_url, minilm):
    """Nothing is replaced here: what the model says of a picture is scored."""
    reward = rewards.llava_bertscore(base_url=llava_url, bert_model=str(minilm), num_layers=6, device="cpu")
    colours = torch.eye(3).view(3, 3, 1, 1).expand(3, 3, 32, 32)
    first, info = reward(colours, ["a cat", "a dog", "a fish"], [{}] * 3)
    again, _ = reward(colours, ["a cat", "a dog", "a fish"], [{}] * 3)
    np.testing.assert_array_equal(first, again)
    assert np.isfinite(first).all() and len(set(info["reply"])) == 3 and info["failures"] == [None] * 3
