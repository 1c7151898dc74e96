"""Models of layers: vision encoder, connector, decoder, VLM, dual encoder, adapters, FLOPs."""
