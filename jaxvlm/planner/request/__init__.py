"""What is planned: model, batch, trainable parameters, and abstract devices."""
