"""The words of the stories.

Each list plays one grammatical role wherever it is used, and no word is in two lists, so that a word tells its role.
Lists that may follow the article "a" hold only words that begin with a consonant sound. Words are short and common:
the text is meant to be dense in choices, not in spelling.
"""

from __future__ import annotations

from nash_mhc.data.grammar import WordList

_LISTS = {
    "names": """
        Ada Alma Amir Anna Anton Basil Bea Ben Bruno Cal Cara Carl Clara Cora Daisy Dana Della Dina Dora Edith Elias
        Ella Elmo Emma Enzo Erik Esme Ethan Eva Ezra Faye Felix Finn Freya Gina Greta Gus Hana Hank Helen Hugo Ida Igor
        Ines Ivan Jada Jonah Juan Judy Jules Kai Karl Kate Kira Kurt Lana Lars Leah Lena Leo Lila Lois Lucy Luis Mary
        Maya Mia Milo Mira Moses Ned Nell Nina Noah Nora Olga Omar Oscar Otto Owen Paul Pia Ralph Ravi Rhea Rosa Ruth
        Sam Sara Silas Sofia Tara Tess Theo Tom Tova Uma Vera Wade Yara Yuri Zane Zelda Zora""",
    "jobs": """
        baker barber beggar boxer brewer butler captain carver clerk clown coach cook cooper dancer diver doctor driver
        duke farmer fisher grocer guard guide healer hunter joiner judge king knight lawyer maid major mason mayor
        miller miner monk nurse pilot pirate poet porter potter priest prince queen ranger rider sailor scribe singer
        smith squire tailor tanner thief tinker trader tutor vicar waiter weaver wizard writer""",
    "traits": """
        bent big blank blunt broad broken bulky cheap clean coarse cold costly dented dirty dull dusty faded fancy fine
        fixed flat fresh frozen giant greasy great hard heavy hollow huge jagged large light little long loose lost
        lucky magic messy muddy musty narrow neat new noisy plain pretty pricey quaint ragged rare round royal rusty
        sacred secret shaky sharp shiny short sleek slim small soft solid spare sticky strong sturdy tall thick thin
        tiny vast warm wet wide wobbly worn""",
    "colours": """
        black blue bronze brown cherry coral cream crimson fawn golden green grey lemon lilac lime maroon mauve navy
        peach pink plum purple red rose ruby russet sable salmon sepia silver tan tawny teal violet white yellow""",
    "materials": """
        bamboo bone brass brick cedar chalk china clay copper cork cotton flint glass jade lace linen marble metal
        nickel nylon paper pewter pine quartz reed rubber satin shell silk slate steel stone straw tin velvet wax
        wicker willow wire wool""",
    "animals": """
        bat bear beaver bee bison boar bull calf camel cat cobra condor cow crab crane crow deer dog dove dragon duck
        falcon finch fox frog gecko goat goose hare hawk hen heron hippo hornet horse hound hyena jaguar koala lamb
        lion lizard llama lynx mole moose moth mouse mule newt panda parrot pig piglet pony puma puppy python ram rat
        raven robin seal shark sheep shrew skunk sloth slug snail snake squid stork swan tiger toad turtle walrus wasp
        whale wolf worm yak zebra""",
    "objects": """
        badge bag ball banjo basin bell bench board boat book bottle bowl box brush bucket cage cart case chain chair
        chest clock coin comb crate crown cup desk dial dish doll door drill drum fan flag flask flute fork frame gate
        globe harp hinge hook jar jewel jug key kite knife lamp latch lens lever lid lock loom map mask medal mop mug
        nail net paddle pail pan pen piano pin pipe plank plate pot purse puzzle raft rake razor ribbon ring rod rope
        rug ruler sack saw shelf shield sickle sled spear spoon stamp stick stool stove sword table tent torch towel
        toy tray trunk vase wagon wand watch wheel whip""",
    "foods": """
        almonds apples bagels bananas beans beets buns burgers cakes candies carrots cashews cookies crepes dates
        donuts eggs figs grapes hams herbs kiwis leeks lentils limes loaves lollies mangos melons muffins mussels
        noodles nuts oats olives onions oranges oysters papayas peaches pears peas pies plums prawns prunes quinces
        raisins ribs rolls scones snacks sprouts steaks tarts toffees turnips waffles walnuts yams""",
    "places": """
        abbey alley arch attic bakery bank barn bay beach bridge brook cabin camp canal canyon cave cellar cliff coast
        corner court creek dairy desert ditch dock dune estate farm fence field forge fort garden grove gulf hall hill
        hotel hut inn island jetty lake lodge manor market marsh meadow mill mine moor museum office oven palace park
        path pier plaza pond pool pub quay ranch range reef ridge river road rock ruin school shed shop shore shrine
        spring stream swamp temple tower town track tunnel wall well wharf yard zoo""",
    "trees": """
        acacia alder ash aspen banyan beech birch bush cactus cypress dogwood ebony elder elm fern fir hazel
        hedge hemlock holly ivy jasmine juniper laurel linden maple myrtle oak palm poplar rowan spruce teak
        thistle vine yew""",
    "clothes": """
        beret bib blazer bonnet bow cap cape cloak coat collar corset dress frock glove gown habit hat hood jacket
        jersey kilt kimono parka poncho robe sash scarf shawl shirt shoe skirt smock sock suit tie tunic turban veil
        vest wig""",
    "handled": """
        admired altered blessed bought broke built buried burned carried caught chose claimed cleaned copied counted
        crushed cursed dragged drew earned filled found got grabbed guarded held hid kept kicked kissed lent lifted
        loved made mended missed moved needed offered opened owned packed painted picked planned praised pulled pushed
        raised rescued saved sold spoiled stole stored studied tested threw tied touched tried used valued wanted
        washed weighed won wrapped""",
    "went": """
        bicycled bolted bounced charged climbed crawled crept danced darted dashed drifted drove fled flew galloped
        glided hiked hobbled hopped hurried jogged jumped leapt limped marched paced paddled raced ran rode rowed
        rushed sailed shuffled skated skied skipped slid sneaked sped strode strolled swam tiptoed trotted trudged
        walked waltzed""",
    "acted": """
        ate blinked coughed cried dozed drank fell froze gazed groaned growled grunted hissed howled hummed knelt
        laughed lurked moaned napped panted played prayed purred rested roared sang sat sighed slept sneezed sniffed
        snored sobbed spat stared sulked thought trembled waited wept whined winked yawned""",
    "moods": """
        bald bold bored brave busy calm cheeky clumsy crafty cranky cruel curious dizzy drowsy feeble fierce filthy
        gentle giddy greedy grumpy hungry jolly kind lazy lonely loud mean merry mighty moody nimble nosy polite poor
        proud quick quiet rich rude sad scared shy silent silly skinny sleepy sly sulky tame timid tired tough vain
        wary wicked wild wise witty young""",
    "feelings": """
        afraid alarmed amazed amused angry anxious ashamed better bitter blissful comfy confused content cosy cross
        daring dismayed eager empty envious excited free glad gloomy grateful guilty happy hopeful hurt idle inspired
        joyful keen lively mellow numb pleased puzzled ready relaxed relieved restless safe secure shocked sick sorry
        stunned tense thrilled upset weary worried zealous""",
    "topics": """
        angels battles cities clouds comets crimes debts dreams dwarves elves engines errors fairies feasts fires
        floods flowers games ghosts giants goblins heroes holidays jokes journeys laws legends lies machines money
        music oceans outlaws planets plays poems prices recipes riches riddles robots rumors science seasons secrets
        ships songs spells spies sports stars stories taxes trains treasure trolls voyages wars wishes witches""",
    "weather": """
        breezes damp darkness dew drizzle drought dust fog frost gales gusts hail haze heat ice mist rain rainbows
        shade showers sleet slush smog smoke snow storms sunshine thunder tornados twilight warmth wind""",
    "skills": """
        bake bargain carve chop code crochet cycle dance debate dig dive draw fish fly forage gossip haggle hunt juggle
        knit march mime paint plant plead pray preach read recite ride row sail sculpt sew sing skate sketch ski spin
        surf swim tango teach trade trap type wait weave weld whittle write yodel""",
    "manners": """
        alone badly blindly boldly briskly calmly daily early fast gladly grandly happily humbly idly kindly lamely
        late lazily madly meekly nobly oddly often quickly quietly rashly rudely sadly safely shyly slowly softly
        stiffly tamely twice warily weakly wearily wildly wisely""",
    "numbers": """
        two three four five six seven eight nine ten eleven twelve twenty thirty forty many some""",
}

WORD_LISTS = {name: WordList(name, words.split()) for name, words in _LISTS.items()}
