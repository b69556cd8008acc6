"""Three-way merge of trees: the changes from `base` to `theirs`, applied to `ours`."""
