"""Prompts of a chat: questions, explanations, lists, letters, stories, sums, texts to rewrite.

Each prompt comes with its subject, and prompts are held out by subject.
"""

import random
from collections.abc import Iterator

TOPICS = """photosynthesis|gravity|inflation|the water cycle|black holes|vaccines|democracy
recycling|machine learning|the French Revolution|earthquakes|volcanoes|the immune system
supply and demand
electric cars|solar panels|wind turbines|DNA|evolution|plate tectonics|the solar system|the moon
the stock market|compound interest|mortgages|budgeting|public speaking|time management|meditation
yoga|sleep|nutrition|vitamins|protein|hydration|jogging|swimming|cycling|chess|poker|photography
painting|watercolours|playing the guitar|the piano|jazz|opera|poetry|novels|film making|theatre
gardening|composting|bees|butterflies|whales|dolphins|elephants|penguins|dogs|cats|horses
coral reefs|rainforests|deserts|glaciers|rivers|climate change|air pollution|plastic waste
the Roman Empire|ancient Egypt|the Renaissance|the Silk Road|the Industrial Revolution
the printing press|the telephone|the steam engine|the internet|email|search engines|databases
operating systems|encryption|passwords|computer viruses|cloud computing|version control
unit testing|recursion|sorting algorithms|hash tables|binary trees|neural networks|robotics
3D printing|bicycles|trains|aeroplanes|bridges|skyscrapers|concrete|steel|glass|paper|coffee|tea
chocolate|bread|cheese|pasta|olive oil|spices|sugar|salt|rice|potatoes|soup|salads|vegetarian diets
fractions|percentages|probability|statistics|algebra|geometry|prime numbers|calculus
atoms|molecules|acids and bases|magnets|electricity|light|sound|heat|friction|energy
job interviews|résumés|teamwork|leadership|remote work|negotiation|customer service|marketing
small businesses|taxes|insurance|savings accounts|credit cards|charities|volunteering|elections
libraries|museums|schools|homework|exams|learning a language|Spanish|grammar|spelling|handwriting
friendship|family|weddings|birthdays|holidays|camping|hiking|road trips|packing a suitcase|hotels"""
ASK = [
    "What is the most important thing to know about {}?",
    "Explain {} to a ten-year-old.",
    "Explain {} in simple terms.",
    "Give me five facts about {}.",
    "List three advantages and three disadvantages of {}.",
    "Write a short paragraph about {}.",
    "Why does {} matter?",
    "Tell me about the history of {}.",
    "Write a short poem about {}.",
    "What are common mistakes people make with {}?",
    "How can I learn more about {}?",
    "Write an introduction for a blog post about {}.",
    "Make a quiz of four questions about {}.",
    "Write a short dialogue between two friends about {}.",
    "Summarize what an expert would say about {} in two sentences.",
    "Give me a step-by-step guide to getting started with {}.",
    "What is the difference between {} and {}?",
    "How are {} and {} related?",
]
LISTS = """books to read in summer|healthy breakfasts|indoor plants|board games for two
science projects|gifts for a grandmother|ways to save money|ways to save water
things to pack for a beach holiday
team-building activities|songs for a party|icebreaker questions|names for a cat|names for a bakery
safety rules for a laboratory|exercises without equipment|habits of good writers|Python libraries
famous inventors|capital cities in Europe|rivers in Africa|musical instruments|kinds of clouds
tools every home needs|questions to ask in an interview|topics for a school essay
desserts with apples|rainy day activities|tips for better sleep|ways to greet a customer
reasons to learn programming"""
PEOPLE = """my manager|a colleague|my teacher|a customer|my landlord|a neighbour|a friend
the hotel|our supplier|the support team|a job applicant|the whole team|the library|my doctor"""
ABOUT = """asking for a day off|saying thank you for their help|moving a meeting to Thursday
complaining about a late delivery|inviting them to a dinner|apologizing for a mistake
asking for a refund|reporting a broken heater|congratulating them on a promotion
asking for feedback on a draft|following up on an unanswered message|announcing a new project
declining an invitation|asking about opening hours|confirming an appointment"""
TONES = ["short", "polite", "friendly", "formal", "cheerful"]
HEROES = """a lonely lighthouse keeper|a young inventor|a talking fox|a retired pirate
a curious robot|two sisters|a nervous dragon|a baker|a night watchman|a lost astronaut
a clever mouse
an old teacher"""
PLACES = """in a snowy village|on a distant planet|in a big city|by the sea|in an old library
in a deep forest|on a train|under the ground|at a school|in a desert town"""
EVENTS = """finds a mysterious letter|loses something precious|makes an unlikely friend
learns to be brave|solves a small mystery|gets an unexpected visitor|starts all over again
has to choose between two doors|hears music in the night|plants a strange seed"""
SUBJECTS = """The committee|My brother|The new engineer|Our neighbour|The small company|The museum
The old captain|Every student|The city council|The football team|A local farmer|The night nurse"""
DEEDS = """has decided to postpone the meeting until next week|built a bridge out of wood and rope
will be opening a shop near the station|could not find the keys to the car
was given an award for the best design|has been working on the report since Monday
wants to plant two hundred trees along the river|forgot to send the invitations in time
sold more tickets than ever before|is planning a trip to the mountains in spring
repaired the clock that nobody else could repair|asked for more time to answer the questions"""
REASONS = """because the weather was very bad|although there was little money
and everybody was happy|but nobody noticed it|after a long discussion|which surprised us all
so that work can go on
in spite of all the warnings|while the others were on holiday"""
REWRITE = [
    "Rewrite this sentence in a more formal way: {}",
    "Make this sentence shorter: {}",
    "Rewrite this in simple words: {}",
    "Turn this sentence into a question: {}",
    "Rewrite this sentence in the passive voice: {}",
    "Continue this text with three more sentences: {}",
    "What is the main verb of this sentence? {}",
    "Write a headline for this news: {}",
]
THINGS = ["apples", "pencils", "stamps", "marbles", "tickets", "cookies", "coins", "eggs", "books"]
NAMES = ["Anna", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas"]
SUMS = [
    "{n} has {a} {t} and buys {b} more. How many {t} does {n} have now?",
    "{n} has {c} {t} and gives away {a}. How many are left?",
    "A box holds {a} {t}. How many {t} are in {b} boxes?",
    "{n} reads {a} pages a day. How many pages does {n} read in {b} days?",
    "What is {c} minus {b}?",
    "What is {a} times {b}? Show your steps.",
    "What is {a} percent of {c}?",
    "{n} shares {c} {t} equally among {b} friends. How many does each friend get?",
    "A train goes {a} km in an hour. How far does it go in {b} hours?",
    "{n} earns {c} dollars a week and spends {a}. How much does {n} save in {b} weeks?",
]


def split(table: str) -> list[str]:
    """Split a table, whose entries are separated by bars and line ends."""
    return table.replace("\n", "|").split("|")


def sentences(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield subject and prompt of sentences to rewrite, without end."""
    while True:
        subject = rng.choice(split(SUBJECTS))
        sentence = f"{subject} {rng.choice(split(DEEDS))} {rng.choice(split(REASONS))}."
        yield sentence, rng.choice(REWRITE).format(sentence)


def sums(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield subject and prompt of small sums, without end."""
    while True:
        words = {"n": rng.choice(NAMES), "t": rng.choice(THINGS)}
        numbers = {"a": rng.randint(2, 40), "b": rng.randint(2, 12), "c": rng.randint(41, 400)}
        prompt = rng.choice(SUMS).format(**words, **numbers)
        yield prompt, prompt


def letters(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield subject and prompt of emails, without end."""
    while True:
        about, who = rng.choice(split(ABOUT)), rng.choice(split(PEOPLE))
        yield f"{about} {who}", f"Write a {rng.choice(TONES)} email to {who}, {about}."


def stories(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield subject and prompt of stories, without end."""
    while True:
        hero, event = rng.choice(split(HEROES)), rng.choice(split(EVENTS))
        kind = rng.choice(["short story", "bedtime story", "first paragraph of a story"])
        yield (
            f"{hero} {event}",
            f"Write a {kind} about {hero} {rng.choice(split(PLACES))} who {event}.",
        )


def lists(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield subject and prompt of lists, without end."""
    while True:
        what, count = rng.choice(split(LISTS)), rng.choice(["three", "five", "seven", "ten"])
        ask = rng.choice(
            ["List {} {}.", "Give me {} {}.", "Suggest {} {}, with a reason for each."]
        )
        yield what, ask.format(count, what)


def questions(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield subject and prompt of questions about one or two topics, without end."""
    topics = split(TOPICS)
    while True:
        topic = rng.choice(topics)
        other = topics[(topics.index(topic) + 1) % len(topics)]
        yield topic, rng.choice(ASK).format(topic, other)
