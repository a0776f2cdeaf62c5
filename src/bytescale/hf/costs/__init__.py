"""What a decoder of transformers costs: counted from its modules, and measured."""
