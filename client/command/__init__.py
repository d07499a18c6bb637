"""What the command lines say, show and read: the parts that `infer`, `bench` and `parity` are made of."""
