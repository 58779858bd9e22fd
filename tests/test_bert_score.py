"""BERTScore recall with a real sentence encoder, against figures of the package bert-score."""

import json

import numpy as np
import pytest
from conftest import GOLDENS

from ddpo_pytorch.scorers.bert_score import BertScoreRecall

TABLE = json.loads((GOLDENS / "bert_score_recall.json").read_text())


@pytest.mark.parametrize("layer", TABLE["layers"], ids=lambda layer: f"layer-{layer['num_layers']}")
def test_recall_equals_bert_score(minilm, layer):
    recall = BertScoreRecall(str(minilm), layer["num_layers"], device="cpu")
    # The long ones are cut at the encoder's 512 tokens; once is enough.
    cases = TABLE["cases"] if layer["num_layers"] == 6 else TABLE["cases"][:8]
    candidates, references = zip(*cases, strict=True)
    np.testing.assert_allclose(recall(candidates, references), layer["recall"][: len(cases)], atol=1e-6)
    # And one by one: nobody's score depends on the batch it is in.
    alone = [recall([c], [r])[0] for c, r in TABLE["cases"][:4]]
    np.testing.assert_allclose(alone, layer["recall"][:4], atol=1e-6)


def test_an_empty_reply_recalls_nothing(minilm):
    recall = BertScoreRecall(str(minilm), 6, device="cpu")
    scores = recall(["", "  \n", "a cat"], ["The image contains a cat"] * 3)
    assert scores[:2].tolist() == [0, 0] and scores[2] > 0.3 and scores.dtype == np.float64


def test_models_and_layers_that_cannot_be_had_are_named(minilm):
    with pytest.raises(ValueError, match="num_layers must be from 0 to 6 .*; got 7"):
        BertScoreRecall(str(minilm), 7, device="cpu")
    with pytest.raises(ValueError, match='cannot load the text encoder "./nowhere"'):
        BertScoreRecall("./nowhere", 6, device="cpu")
