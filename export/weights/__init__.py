"""From stored weights to a torch model: adapters, vocabulary, and the dtype in which it is proven."""
