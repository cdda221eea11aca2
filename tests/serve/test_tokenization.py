"""`/tokenize` and `/detokenize`."""

from starlette.testclient import TestClient

from .fake_engine import FakeEngine

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_text_becomes_ids_and_ids_the_same_text(client: TestClient, engine: FakeEngine) -> None:
    reply = client.post("/tokenize", json={"prompt": "Hello wörld"}).json()
    assert reply["tokens"] == engine.tokenizer.encode("Hello wörld")
    assert reply["count"] == len(reply["tokens"])
    assert reply["max_model_len"] == engine.max_model_len
    assert reply["token_strs"] is None
    body = {"model": "fake/model", "tokens": reply["tokens"]}
    assert client.post("/detokenize", json=body).json() == {"prompt": "Hello wörld"}


def test_conversations_are_rendered_first(client: TestClient, engine: FakeEngine) -> None:
    tokens = client.post("/tokenize", json={"messages": MESSAGES, "model": "fake/model"}).json()["tokens"]
    assert engine.tokenizer.decode(tokens) == "[user]Hi\n[assistant]"
    body = {"messages": MESSAGES, "add_generation_prompt": False, "return_token_strs": True}
    reply = client.post("/tokenize", json=body).json()
    assert "".join(reply["token_strs"]) == "[user]Hi\n"


def test_an_empty_text_has_no_tokens(client: TestClient) -> None:
    assert client.post("/tokenize", json={"prompt": ""}).json()["count"] == 0
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_wrong_requests_are_refused_by_name(client: TestClient) -> None:
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [0, 10**6]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [], "x": 1}, "x"),
    ):
        reply = client.post(path, json=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param
