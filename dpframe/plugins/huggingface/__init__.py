"""`recipe=sft`, `recipe=classify` and `callbacks=save_pretrained`, on models of `transformers`."""
