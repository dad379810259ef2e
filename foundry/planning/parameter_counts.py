"""Number of parameters of a model, with and without embeddings and output head."""

from torch import nn

from foundry.optim.optimizers import HasHead


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the number of parameters without embeddings and head, and of all parameters; a shared one counts once.

    Embeddings are the parameters of `nn.Embedding` layers: tokens, and learned positions or values if the model has
    them. The head is the output layer that the model declares (`output_head`).

    Args:
        model: the model; its parameters need not be allocated.
    """
    embeddings = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    heads = [module.output_head() for module in model.modules() if isinstance(module, HasHead)]
    left_out = embeddings | {p for head in heads if head is not None for p in head.parameters()}
    parameters = set(model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    return total - sum(parameter.numel() for parameter in parameters & left_out), total
