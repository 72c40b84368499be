"""Codecs whose workers may agree on their scales first."""


class SharedScales:
  """A base of codecs that add up as integers where all workers have one scale."""

  share_scale: bool

  @property
  def agrees(self) -> bool:
    return self.share_scale

  @property
  def summable(self) -> bool:
    return self.share_scale
