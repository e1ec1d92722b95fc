def test_x(tiny_tokenizer):
    t=tiny_tokenizer
    print(len(t), t("Hello World\n1+1=2", add_special_tokens=False), t.decode(t("Hello World\n1+1=2")["input_ids"]))
    print(t.apply_chat_template([{"role":"user","content":"hi"}], tokenize=False))
    print(t.convert_tokens_to_ids("<|endoftext|>"), t.eos_token_id, t.get_vocab().get("<|endoftext|>"))
    assert 0
