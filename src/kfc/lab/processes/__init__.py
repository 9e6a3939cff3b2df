"""The processes that torchrun starts to train one network together."""
