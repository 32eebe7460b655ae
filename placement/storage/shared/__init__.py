"""Host copies that the ranks of one machine share: who says what, who writes which part, and how storages get there."""
