"""The papers that codecs, exchanges and feedback come from, as BibTeX entries."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Citation(NamedTuple):
  """A paper in an attribute ``citations``, for :func:`gradcomp.citation`."""

  bibtex: str  # the paper's entry
  departure: str  # from the paper, or what of it this is, in sentences


def cites(*citations: Citation) -> Callable[[_Function], _Function]:
  """Names the papers of a transformation at its ``update`` function."""

  def mark(function: _Function) -> _Function:
    function.__dict__["citations"] = citations
    return function

  return mark


def _entry(text: str) -> str:
  """Returns a BibTeX entry of lines: key and number in arXiv, authors, title, more."""
  first, authors, title, *others = text.splitlines()
  key, *arxiv = first.split()
  year = re.findall(r"\d{4}", key)[0]
  fields = {"author": authors, "title": f"{{{title}}}", "year": year}
  fields |= dict(line.split(" = ") for line in others)
  if arxiv:
    fields |= {"eprint": arxiv[0], "archivePrefix": "arXiv"}
  lines = (f"  {name} = {{{value}}}" for name, value in fields.items())
  return f"@misc{{{key},\n" + ",\n".join(lines) + "\n}"


AHN_2025 = _entry("""ahn2025dion 2504.05295
Ahn, Kwangjun and Xu, Byron and Abreu, Natalie and Fan, Ying and Magakyan, Gagik and \
Sharma, Pratyusha and Zhan, Zheng and Langford, John
Dion: Distributed Orthonormalized Updates""")
ALISTARH_2017 = _entry("""alistarh2017qsgd 1610.02132
Alistarh, Dan and Grubic, Demjan and Li, Jerry and Tomioka, Ryota and Vojnovic, Milan
QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding""")
BERNSTEIN_2018 = _entry("""bernstein2018vote 1810.05291
Bernstein, Jeremy and Zhao, Jiawei and Azizzadenesheli, Kamyar and Anandkumar, Anima
signSGD with Majority Vote is Communication Efficient And Fault Tolerant""")
CHEN_2020 = _entry("""chen2020scalecom 2104.11125
Chen, Chia-Yu and others
ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient \
Distributed Training""")
DETTMERS_2016 = _entry("""dettmers2016approximations 1511.04561
Dettmers, Tim
8-Bit Approximations for Parallelism in Deep Learning""")
DOUILLARD_2023 = _entry("""douillard2023diloco 2311.08105
Douillard, Arthur and others
DiLoCo: Distributed Low-Communication Training of Language Models""")
DOUILLARD_2025 = _entry("""douillard2025streaming 2501.18512
Douillard, Arthur and Donchev, Yanislav and Rush, Keith and Kale, Satyen and Charles, \
Zachary and Garrett, Zachary and Teston, Gabriel and Lacey, Dave and McIlroy, Ross and \
Shen, Jiajun and Ram{\\'e}, Alexandre and Szlam, Arthur and Ranzato, Marc'Aurelio and \
Barham, Paul
Streaming DiLoCo with Overlapping Communication: Towards a Distributed Free Lunch""")
FANG_2018 = _entry("""fang2018redsync 1808.04357
Fang, Jiarui and Fu, Haohuan and Yang, Guangwen and Hsieh, Cho-Jui
RedSync: Reducing Synchronization Bandwidth for Distributed Deep Learning Training \
System""")
GRUBIC_2018 = _entry("""grubic2018synchronous
Grubic, Demjan and Tam, Leo K. and Alistarh, Dan and Zhang, Ce
Synchronous Multi-GPU Deep Learning with Low-Precision Communication: An Experimental \
Study
doi = 10.3929/ethz-b-000319485""")
HAN_2021 = _entry("""han2021aps 1911.08907
Han, Ruobing and Si, Min and Demmel, James and You, Yang
Auto-Precision Scaling for Distributed Deep Learning""")
HORVATH_2019 = _entry("""horvath2019natural 1905.10988
Horv{\\'a}th, Samuel and others
Natural Compression for Distributed Deep Learning""")
JIA_2024 = _entry("""jia2024sdp4bit 2410.15526
Jia, Jinda and Xie, Cong and Lu, Hanlin and Wang, Daoce and Feng, Hao and Zhang, \
Chengming and Sun, Baixi and Lin, Haibin and Zhang, Zhi and Liu, Xin and Tao, Dingwen
SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data Parallelism for LLM \
Training""")
KARIMIREDDY_2019 = _entry("""karimireddy2019error 1901.09847
Karimireddy, Sai Praneeth and Rebjock, Quentin and Stich, Sebastian U. and Jaggi, Martin
Error Feedback Fixes SignSGD and other Gradient Compression Schemes""")
LIN_2018 = _entry("""lin2018dgc 1712.01887
Lin, Yujun and Han, Song and Mao, Huizi and Wang, Yu and Dally, William J.
Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed \
Training""")
LIN_2018_LOCAL = _entry("""lin2018local 1808.07217
Lin, Tao and Stich, Sebastian U. and Patel, Kumar Kshitij and Jaggi, Martin
Don't Use Large Mini-Batches, Use Local SGD""")
LU_2022 = _entry("""lu2022zeroone 2202.06009
Lu, Yucheng and Li, Conglong and Zhang, Minjia and De Sa, Christopher and He, Yuxiong
Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam""")
MICIKEVICIUS_2017 = _entry("""micikevicius2017mixed 1710.03740
Micikevicius, Paulius and others
Mixed Precision Training""")
MISHRA_2025 = _entry("""mishra2025mxfp8 2506.08027
Mishra, Asit and Stosic, Dusan and Layton, Simon
Recipes for Pre-training LLMs with MXFP8""")
NVIDIA_2025 = _entry("""nvidia2025nvfp4 2509.25149
{NVIDIA}
Pretraining Large Language Models with NVFP4""")
RAJBHANDARI_2020 = _entry("""rajbhandari2020zero 1910.02054
Rajbhandari, Samyam and Rasley, Jeff and Ruwase, Olatunji and He, Yuxiong
ZeRO: Memory Optimizations Toward Training Trillion Parameter Models""")
RICHTARIK_2021 = _entry("""richtarik2021ef21 2106.05203
Richt{\\'a}rik, Peter and Sokolov, Igor and Fatkhullin, Ilyas
EF21: A New, Simpler, Theoretically Better, and Practically Faster Error Feedback""")
ROUHANI_2023 = _entry("""rouhani2023microscaling 2310.10537
Rouhani, Bita Darvish and Zhao, Ritchie and More, Ankit and others
Microscaling Data Formats for Deep Learning""")
SARFI_2025 = _entry("""sarfi2025sparseloco 2508.15706
Sarfi, Amir and others
Communication Efficient LLM Pre-training with SparseLoCo""")
SEIDE_2014 = _entry("""seide2014onebit
Seide, Frank and Fu, Hao and Droppo, Jasha and Li, Gang and Yu, Dong
1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed \
Training of Speech DNNs
howpublished = Interspeech
url = https://www.isca-archive.org/interspeech_2014/seide14_interspeech.html""")
STICH_2018 = _entry("""stich2018memory 1809.07599
Stich, Sebastian U. and Cordonnier, Jean-Baptiste and Jaggi, Martin
Sparsified SGD with Memory""")
STROM_2015 = _entry("""strom2015scalable
Strom, Nikko
Scalable Distributed DNN Training Using Commodity GPU Cloud Computing
howpublished = Interspeech
url = https://www.isca-archive.org/interspeech_2015/strom15_interspeech.html""")
TANG_2021 = _entry("""tang2021onebitadam 2102.02888
Tang, Hanlin and others
1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence \
Speed""")
VARGAFTIK_2021 = _entry("""vargaftik2021drive 2105.08339
Vargaftik, Shay and Ben-Basat, Ran and Portnoy, Amit and Mendelson, Gal and \
Ben-Itzhak, Yaniv and Mitzenmacher, Michael
DRIVE: One-bit Distributed Mean Estimation""")
VARGAFTIK_2022 = _entry("""vargaftik2022eden 2108.08842
Vargaftik, Shay and Ben-Basat, Ran and Portnoy, Amit and Mendelson, Gal and \
Ben-Itzhak, Yaniv and Mitzenmacher, Michael
EDEN: Communication-Efficient and Robust Distributed Mean Estimation for Federated \
Learning""")
VOGELS_2019 = _entry("""vogels2019powersgd 1905.13727
Vogels, Thijs and Karimireddy, Sai Praneeth and Jaggi, Martin
PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization""")
WEN_2017 = _entry("""wen2017terngrad 1705.07878
Wen, Wei and Xu, Cong and Yan, Feng and Wu, Chunpeng and Wang, Yandan and Chen, Yiran \
and Li, Hai
TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning""")
ZHANG_2023 = _entry("""zhang2023acpsgd 2306.08881
Zhang, Lin and Zhang, Longteng and Shi, Shaohuai and Chu, Xiaowen and Li, Bo
Evaluation and Optimization of Gradient Compression for Distributed Deep Learning""")
ZHANG_2017 = _entry("""zhang2017zipml 1611.05402
Zhang, Hantian and Li, Jerry and Kara, Kaan and Alistarh, Dan and Liu, Ji and Zhang, Ce
ZipML: Training Linear Models with End-to-End Low Precision, and a Little Bit of Deep \
Learning""")
