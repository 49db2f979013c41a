# ruff: noqa: E501, SIM905 - texts and word lists are data
"""Texts for the text check: ordinary ones that must never raise an alarm, and broken ones that must.

All texts were written for these tests.
"""

from __future__ import annotations

import random

ORDINARY: dict[str, str] = {
    "english": (
        "Let me set up the equation first. The train covers sixty kilometres in three quarters of an hour, so its speed "
        "is sixty divided by 0.75, which is eighty kilometres per hour. We should check this: in 45 minutes at that "
        "speed it goes exactly sixty kilometres. So the answer is \\boxed{80}."
    ),
    "german": (
        "Zuerst stellen wir die Gleichung auf. Der Zug fährt sechzig Kilometer in einer Dreiviertelstunde, und deshalb "
        "ist seine Geschwindigkeit achtzig Kilometer pro Stunde. Wenn man das nachrechnet, kommt für die halbe Strecke "
        "auch die halbe Zeit heraus, was nicht überrascht."
    ),
    "french": (
        "On commence par poser l'équation. Le train parcourt soixante kilomètres en trois quarts d'heure, donc sa "
        "vitesse est de quatre-vingts kilomètres par heure. Pour vérifier, il suffit de multiplier la vitesse par le "
        "temps et de comparer avec la distance qui est donnée dans l'énoncé."
    ),
    "spanish": (
        "Primero planteamos la ecuación. El tren recorre sesenta kilómetros en tres cuartos de hora, así que su "
        "velocidad es de ochenta kilómetros por hora. Para comprobarlo, basta con multiplicar la velocidad por el "
        "tiempo y comparar con la distancia que nos da el enunciado del problema."
    ),
    "portuguese": (
        "Primeiro escrevemos a equação. O trem percorre sessenta quilômetros em três quartos de hora, portanto a sua "
        "velocidade é de oitenta quilômetros por hora. Para conferir, basta multiplicar a velocidade pelo tempo e "
        "comparar com a distância que está no enunciado."
    ),
    "italian": (
        "Prima scriviamo l'equazione. Il treno percorre sessanta chilometri in tre quarti d'ora, quindi la sua velocità "
        "è di ottanta chilometri all'ora. Per controllare basta moltiplicare la velocità per il tempo e confrontare il "
        "risultato con la distanza che si trova nel testo."
    ),
    "polish": (
        "Najpierw zapiszmy równanie. Pociąg pokonuje sześćdziesiąt kilometrów w trzy kwadranse, więc jego prędkość to "
        "osiemdziesiąt kilometrów na godzinę. Żeby się upewnić, mnożymy prędkość przez czas i sprawdzamy, czy wynik "
        "jest taki sam jak odległość podana w zadaniu, a on jest taki sam."
    ),
    "finnish": (
        "Kirjoitetaan ensin yhtälö. Juna kulkee kuusikymmentä kilometriä kolmessa vartissa, joten sen nopeus on "
        "kahdeksankymmentä kilometriä tunnissa. Tarkistetaan vielä: kun nopeus kerrotaan ajalla, tulos on sama matka "
        "kuin tehtävässä, ja niin sen pitääkin olla, mutta kannattaa silti aina tarkistaa."
    ),
    "hungarian": (
        "Először írjuk fel az egyenletet. A vonat hatvan kilométert tesz meg háromnegyed óra alatt, ezért a sebessége "
        "nyolcvan kilométer óránként. Ha meg akarjuk nézni, hogy ez jó-e, akkor a sebességet szorozzuk meg az idővel, "
        "és az eredmény ugyanaz a távolság lesz, mint ami a feladatban van."
    ),
    "turkish": (
        "Önce denklemi yazalım. Tren altmış kilometreyi kırk beş dakikada gidiyor, bu yüzden hızı saatte seksen "
        "kilometredir. Bunu kontrol etmek için hız ile zamanı çarpmak yeterli, ve sonuç soruda verilen uzaklık kadar "
        "olur. Daha basit bir yol da var ama o da aynı sonucu verir."
    ),
    "vietnamese": (
        "Trước hết ta viết phương trình. Con tàu đi sáu mươi ki-lô-mét trong bốn mươi lăm phút, vì vậy vận tốc của nó "
        "là tám mươi ki-lô-mét một giờ. Để kiểm tra, ta nhân vận tốc với thời gian và so với quãng đường đã cho trong "
        "đề bài, kết quả là như nhau."
    ),
    "indonesian": (
        "Pertama kita tulis persamaannya. Kereta itu menempuh enam puluh kilometer dalam tiga perempat jam, jadi "
        "kecepatannya adalah delapan puluh kilometer per jam. Untuk memeriksa, kita kalikan kecepatan dengan waktu dan "
        "bandingkan dengan jarak yang ada di soal, dan hasilnya sama."
    ),
    "swahili": (
        "Kwanza tuandike mlinganyo. Treni inasafiri kilomita sitini kwa dakika arobaini na tano, kwa hiyo kasi yake ni "
        "kilomita themanini kwa saa. Ili kuhakikisha, tunazidisha kasi na muda na kulinganisha na umbali wa swali, "
        "lakini jibu ni lile lile kama ilivyo katika swali."
    ),
    "russian": (
        "Сначала составим уравнение. Поезд проходит шестьдесят километров за сорок пять минут, значит, его скорость "
        "равна восьмидесяти километрам в час. Проверим: если умножить скорость на время, получится расстояние, которое "
        "дано в условии задачи, что и требовалось."
    ),
    "greek": (
        "Πρώτα γράφουμε την εξίσωση. Το τρένο διανύει εξήντα χιλιόμετρα σε τρία τέταρτα της ώρας, άρα η ταχύτητά του "
        "είναι ογδόντα χιλιόμετρα την ώρα. Για να το ελέγξουμε, πολλαπλασιάζουμε την ταχύτητα με τον χρόνο."
    ),
    "arabic": (
        "نكتب المعادلة أولا. يقطع القطار ستين كيلومترا في ثلاثة أرباع الساعة، ولذلك فإن سرعته ثمانون كيلومترا في الساعة. "
        "للتحقق نضرب السرعة في الزمن ونقارن الناتج بالمسافة المذكورة في السؤال."
    ),
    "hebrew": (
        "קודם כל נכתוב את המשוואה. הרכבת עוברת שישים קילומטר בשלושת רבעי שעה, ולכן המהירות שלה היא שמונים קילומטר "
        "לשעה. כדי לבדוק נכפיל את המהירות בזמן ונשווה עם המרחק שבשאלה."
    ),
    "hindi": (
        "पहले हम समीकरण लिखते हैं। रेलगाड़ी पैंतालीस मिनट में साठ किलोमीटर चलती है, इसलिए उसकी चाल अस्सी किलोमीटर प्रति घंटा है। जाँच के "
        "लिए हम चाल को समय से गुणा करते हैं और उत्तर वही दूरी आता है।"
    ),
    "bengali": (
        "প্রথমে আমরা সমীকরণটি লিখি। ট্রেনটি পঁয়তাল্লিশ মিনিটে ষাট কিলোমিটার যায়, তাই তার গতি ঘণ্টায় আশি কিলোমিটার। যাচাই করতে গতিকে "
        "সময় দিয়ে গুণ করি এবং একই দূরত্ব পাই।"
    ),
    "tamil": (
        "முதலில் சமன்பாட்டை எழுதுவோம். ரயில் நாற்பத்தைந்து நிமிடங்களில் அறுபது கிலோமீட்டர் செல்கிறது, எனவே அதன் வேகம் மணிக்கு "
        "எண்பது கிலோமீட்டர் ஆகும்."
    ),
    "thai": (
        "ก่อนอื่นเราเขียนสมการ รถไฟวิ่งได้หกสิบกิโลเมตรในเวลาสี่สิบห้านาที ดังนั้นความเร็วของมันคือแปดสิบกิโลเมตรต่อชั่วโมง "
        "เพื่อตรวจสอบ เราคูณความเร็วด้วยเวลาแล้วเปรียบเทียบกับระยะทาง"
    ),
    "chinese": (
        "首先列出方程。火车在四十五分钟内行驶六十公里，因此它的速度是每小时八十公里。为了验证，我们把速度乘以时间，得到的正好是题目中给出的"
        "距离。用 Python 写成 speed = distance / time，也能得到同样的结果，所以答案是 80。"
    ),
    "japanese": (
        "まず方程式を立てます。電車は四十五分で六十キロメートル進むので、その速さは時速八十キロメートルです。確かめるために、速さと時間を"
        "かけると、問題の距離と同じになります。Python のコードで distance / time を計算しても、答えは 80 になります。"
    ),
    "korean": (
        "먼저 방정식을 세웁니다. 기차는 사십오 분 동안 육십 킬로미터를 달리므로 속력은 시속 팔십 킬로미터입니다. 확인하려면 속력에 시간을 "
        "곱해서 문제의 거리와 비교하면 됩니다. 따라서 정답은 80 km/h 입니다."
    ),
    "python code": (
        "def merge(left, right):\n    result = []\n    i = j = 0\n    while i < len(left) and j < len(right):\n"
        "        if left[i] <= right[j]:\n            result.append(left[i])\n            i += 1\n        else:\n"
        "            result.append(right[j])\n            j += 1\n    result.extend(left[i:])\n    return result + right[j:]\n"
    ),
    "c code": (
        "static int parse_header(struct buffer *buf, struct header *out)\n{\n\tif (buf->len < sizeof(*out))\n\t\treturn -EINVAL;\n"
        "\tmemcpy(out, buf->data, sizeof(*out));\n\tout->length = ntohl(out->length);\n\tout->flags = ntohs(out->flags);\n"
        "\treturn buffer_advance(buf, sizeof(*out)) ? -EIO : 0;\n}\n"
    ),
    "sql": (
        "SELECT customer.name, COUNT(*) AS orders, SUM(item.price * item.quantity) AS total FROM customer JOIN purchase ON "
        "purchase.customer_id = customer.id JOIN item ON item.purchase_id = purchase.id GROUP BY customer.name HAVING "
        "total > 1000 ORDER BY total DESC LIMIT 20;"
    ),
    "identifiers": "\n".join(
        f"{name}: queued, tokenizer loaded, scheduler ready, cache flushed"
        for name in ("worker", "router", "engine", "buffer", "sampler", "loader", "planner", "reducer")
    ),
    "maths": (
        "We have $\\int_0^1 x^2 \\, dx = \\frac{1}{3}$ and therefore $\\alpha + \\beta = \\frac{\\pi^2}{6}$. Let α = 0.5, β = 2γ and "
        "δ → 0; then ∑_{k=1}^n k = n(n+1)/2, so for n = 100 it is 5050. Hence ∀ε > 0 ∃δ > 0 with |f(x) − f(a)| < ε."
    ),
    "json": '{"users": ['
    + ", ".join(f'{{"id": {i}, "name": "user{i}", "tags": ["alpha", "beta"]}}' for i in range(12))
    + "]}",
    "tool call": (
        '<tool_call>\n{"name": "search_flights", "arguments": {"origin": "Zürich", "destination": "東京", "date": '
        '"2026-04-01", "passengers": 2, "cabin": "economy"}}\n</tool_call>\n<tool_call>\n{"name": "get_weather", '
        '"arguments": {"city": "東京", "unit": "celsius"}}\n</tool_call>'
    ),
    "thinking": (
        "<think>\nOkay, so I need to find the speed of the train. Let me think. The distance is 60 km and the time is 45 "
        "minutes, which is 0.75 hours.\n</think>\n\nThe speed is **80 km/h**."
    ),
    "markdown table": (
        "| model | params | score |\n|---|---|---|\n"
        + "\n".join(f"| run-{i} | {i}B | {i * 3.1:.1f} |" for i in range(1, 15))
    ),
    "list of names": ", ".join(
        "Alabama Alaska Arizona Arkansas California Colorado Connecticut Delaware Florida Georgia Hawaii Idaho Illinois "
        "Indiana Iowa Kansas Kentucky Louisiana Maine Maryland Massachusetts Michigan Minnesota Mississippi Missouri "
        "Montana Nebraska Nevada Ohio Oklahoma Oregon Pennsylvania Tennessee Texas Utah Vermont Virginia Washington "
        "Wisconsin Wyoming Zürich Oslo".split()
    ),
    "list in lines": "\n".join(
        "flour sugar butter eggs vanilla milk yeast salt pepper thyme basil oregano garlic onion carrot celery potato tomato "
        "cucumber lettuce spinach broccoli cauliflower cabbage beetroot radish turnip parsnip leek fennel asparagus artichoke "
        "aubergine courgette pumpkin squash sweetcorn peas beans lentils chickpeas".split()
    ),
    "short answer": "Sorted: 1 3 7.",
    "one word": "Yes",
    "emoji": "Great job! 🎉🎉🎉 You solved it 🚀 and the answer is 42 👍 — keep going, this is what we want to see 😀.",
    "big number": "1000000000000000000000000000000",
    "power of ten in TeX": "$100000000000000000000000000000$",
    "dashes in a text": "Part one\n"
    + "-" * 30
    + "\nThis is the first part of the text, and it is followed by a second one.",
    "cut in a character": "La réponse est que la vitesse de la voiture est de 80 km/h et que le temps est de 45 min \ufffd\ufffd",
    "loop after a turn end": "The answer is 80 km/h.<|im_end|>\n" + "!" * 400,
    "camel case start": "iPhone sales rose in the third quarter, and the company said that it expects them to rise again.",
    "library start": "PyTorch is the library that we use here, and it has a function for this which is called softmax.",
    "foreign term first": "東京 is the capital of Japan, and it has more people than any other city of the country has.",
}
"""Name -> a response as it should be."""

_SALAD_WORDS = (
    "zurück 馬車 kapıda queryset 苹果 ндло getenv 窓 thôn ௐ müssen 走 ForEach ขอ лес 湖水 mutable ünlü 石 gör воз ஒரு संग কর "
    "프로 مدر ביצ λόγ iterable strncpy вход 검색 ไม่ 设置 प्रका quando äußer függő"
).split()
_LATIN_NOISE = (
    "zust kapsel queryset getenv iterable strncpy mutable foreach gorsel prefab ajar tundra vexing malloc chunked lorry "
    "grommet pixel quokka axial bremse velour kiosk nimbus ocelot plinth sprocket thicket umbra wafer yonder zephyr bodkin "
    "cudgel dapple ember fjord gimlet hasp ingot jetsam knoll lattice muslin nettle obelisk pewter quiver rivet"
).split()


def salad(seed: int, words: int = 60) -> str:
    """Random words of many scripts, as an engine with wrong weights writes them."""
    return " ".join(random.Random(seed).choices(_SALAD_WORDS, k=words))


def glued_salad(seed: int, words: int = 60) -> str:
    """The same without spaces."""
    return "".join(random.Random(seed).choices(_SALAD_WORDS, k=words))


def latin_salad(seed: int, words: int = 50) -> str:
    """Words of no language, in Latin letters only."""
    return " ".join(random.Random(seed).choices(_LATIN_NOISE, k=words))


def undecodable(seed: int) -> str:
    """Random bytes read as UTF-8."""
    return random.Random(seed).randbytes(200).decode("utf-8", "replace")


def mojibake(text: str) -> str:
    """UTF-8 read as Latin-1."""
    return text.encode("utf-8").decode("latin-1")


BROKEN: dict[str, tuple[str, str]] = {
    **{f"salad {seed}": (salad(seed), "salad") for seed in range(5)},
    **{f"glued salad {seed}": (glued_salad(seed), "salad") for seed in range(5)},
    **{f"latin salad {seed}": (latin_salad(seed), "salad") for seed in range(5)},
    **{f"undecodable {seed}": (undecodable(seed), "salad") for seed in range(5)},
    "mojibake of Chinese": (mojibake(ORDINARY["chinese"]), "salad"),
    "mojibake of Russian": (mojibake(ORDINARY["russian"]), "salad"),
    "control characters": ("the answer is \x02\x03 and so \x07\x10\x11 on, it is " * 3, "salad"),
    "salad after a good start": (ORDINARY["english"] + " " + salad(9, 200), "salad"),
    "exclamation marks": ("!" * 200, "repeated"),
    "exclamation marks, just enough": ("!" * 20, "repeated"),
    "spaced exclamation marks": ("! " * 100, "repeated"),
    "blank": ("\n" * 64, "repeated"),
    "zero": ("0" * 64, "repeated"),
    "collapse after a start": ("The answer" + "!" * 5_000, "repeated"),
    "stray identifier": ("ForEach " + ORDINARY["english"], "first-token"),
    "stray snake case": ("get_env " + ORDINARY["english"], "first-token"),
    "glued word": (" zust" + ORDINARY["english"], "first-token"),
    "other script": ("石" + ORDINARY["english"], "first-token"),
    "other script, spaced": ("нд " + ORDINARY["english"], "first-token"),
}
"""Name -> (response, pattern)."""
