"""The words of the stories: some thirteen hundred, made of a few hundred parts, and plain numbers.

Each list plays one grammatical role wherever it is used, and no word is in two lists, so that a word tells its role.
Lists that may follow the article "a" hold only words that begin with a consonant sound. The long lists are compounds
(14 first halves times 12 second halves are 168 objects): as rich in choices as any word list, but a model that has seen
each half can spell them all, so that minutes of training are enough to come near the floor.
"""

from __future__ import annotations

from nash_mhc.data.stories.grammar import WordList


def _words(text: str) -> list[str]:
    return text.split()


def _compounds(firsts: str, seconds: str) -> list[str]:
    return [first + second for first in firsts.split() for second in seconds.split()]


def _plural(word: str) -> str:
    if word.endswith(("ch", "sh", "s", "x")):
        return word + "es"
    return word[:-1] + "ies" if word.endswith("y") and word[-2] not in "aeiou" else word + "s"


_MOODS = _words("""
        bold brave bright brisk calm cruel fierce fond glad grand harsh kind loud meek mild neat proud quick
        quiet rude sad sly stern wise""")

_LISTS: dict[str, list[str]] = {
    "names": _compounds("Al Be Da El Ha Ka Li Mi No Ro Sa To", "bo da dor la lin mas na nor ra ric vin zo"),
    "places": _compounds("Ash Bay Cor Dun Elm Fen Hay Mar Nor Oak Sud Wes", "by den don ey gate ham ley mor ow sey ton wyn"),
    "objects": _compounds(
        "bed cat day dew fog gem hen moon pig rain sea sky sun tea", "bag bell can cup drum fan jar key lid pan pot rod"
    ),
    "foods": _compounds("corn egg fig nut oat pea plum rice rye yam", "bars buns dips jams pies rolls stews tarts"),
    "clothes": _compounds("beach fur gym lab lace road ski wet", "bib cap coat gown hat robe shoe sock vest wig"),
    "topics": _compounds("air bog cave fire ice mud storm tree war wood", "ants apes bats gods hogs imps men orcs owls rats"),
    "jobs": _compounds("boat cab cow dock farm hat log net pot shop stone team", "boy girl lad maid"),
    "moods": _MOODS,
    "manners": [mood + "ly" for mood in _MOODS],
    "animals": _words("""
        bear bee bull camel cat cow crab crow donkey dog dove duck fox frog goat gull hare hen horse lamb
        lion mole moth monkey mule newt pig pony rat seal spider snail swan toad wasp whale"""),
    "traits": _words("""
        bent big blunt broken cheap clean cold dull dusty fine flat fresh hard heavy hollow huge large light
        little long lost lucky new plain rare round rusty sharp shiny short small soft tall thick warm"""),
    "colours": _words("""
        black blue bronze brown coral cream golden green grey lemon lilac lime maroon peach pink purple red
        ruby silver tan teal violet white yellow"""),
    "materials": _words("""
        bamboo bone brass cedar chalk clay copper cork cotton flint glass jade linen marble paper pewter
        satin shell silk slate steel tin velvet wax"""),
    "trees": _words("""
        alder aspen birch chestnut elder fir hazel hawthorn elm laurel linden maple palm poplar rowan spruce
        willow yew"""),
    "handled": _words("""
        bought broke built buried carried caught chose cleaned copied counted dropped filled found grabbed
        hid kept lent lifted loved made mended missed moved opened packed painted pulled pushed saved sold
        stole threw touched used wanted washed"""),
    "went": _words("""
        climbed crawled crept danced dashed drifted drove fled flew hiked hopped hurried jumped marched
        raced ran rode rushed sailed skipped strolled swam trotted walked"""),
    "acted": _words("""
        coughed cried dozed fell froze groaned growled grunted hummed knelt laughed moaned played prayed
        rested sang sat sighed slept sneezed stared waited wept yawned"""),
    "feelings": _words("""
        afraid amazed angry ashamed bitter cosy eager empty excited free gloomy guilty happy hopeful hurt
        lonely pleased puzzled ready safe sick sorry tired worried"""),
    "weather": _words("""
        dew drizzle drought dust fog gales hail haze heat ice mist showers sleet smoke thunder storms"""),
    "skills": _words("""
        bake carve cook dance dig dive draw fish fly hunt juggle knit paint plant read ride row sail sew
        sing skate ski swim write"""),
    "counts": [str(number) for number in range(10, 100)],
    "prices": [str(number) for number in range(100, 1000)],
}

# Plurals are words of their own: every filler stands between delimiters, which keeps the grammar unambiguous.
_LISTS |= {"many_" + name: [_plural(word) for word in _LISTS[name]] for name in ("objects", "animals", "jobs", "trees")}
del _LISTS["trees"]

WORD_LISTS = {name: WordList(name, words) for name, words in _LISTS.items()}
